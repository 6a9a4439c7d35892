"""What a user may get wrong about trials."""

from typing import Final

import pytest

from support.bad_input import Refused, edited

TRIALS: Final = {
    "time limit that never ends": (
        ("search: {space: uniform}", "trials: {timeout_s: 1e300}"),
        "trials.timeout_s: found 1e+300; expected 0.001 to 100,000,000 seconds",
    ),
    "groups without end": (
        ("search: {space: uniform}", "trials: {host_groups: 999999999}"),
        "trials.host_groups: found 999999999; it must divide the number of nodes, 2",
    ),
    "pattern too deep to read": (
        (
            "search: {space: uniform}",
            f"trials: {{program: {{argv: [a], metric: {{pattern: '{'(' * 2000 + ')' * 2000}'}}}}}}",
        ),
        "trials.program.metric.pattern: found '((((",
    ),
}


@pytest.mark.parametrize(("replacement", "message"), TRIALS.values(), ids=TRIALS)
def test_wrong_trials_are_led_to_their_line(
    refused: Refused, replacement: tuple[str, str], message: str
) -> None:
    assert message in refused({"experiment.yaml": edited(replacement)})
