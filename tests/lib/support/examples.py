"""Number of cases of a property whose cases take long."""

from hypothesis import settings


def examples(num: int) -> settings:
    """Draw ``num`` cases, or more if the profile `HYPOTHESIS_PROFILE` asks for more."""
    profile = settings()
    asked = profile.max_examples > settings.get_profile("ci").max_examples
    return settings(profile, max_examples=profile.max_examples if asked else num)
