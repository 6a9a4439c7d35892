"""How many cases a property draws whose cases are dear."""

from hypothesis import settings


def examples(num: int) -> settings:
    """Draw so many cases, or as many as `HYPOTHESIS_PROFILE` says where it asks for more."""
    profile = settings()
    asked = profile.max_examples > settings.get_profile("ci").max_examples
    return settings(profile, max_examples=profile.max_examples if asked else num)
