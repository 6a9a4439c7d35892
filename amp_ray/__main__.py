"""``python -m amp_ray`` is ``amp-ray``."""

from amp_ray.cli import main

main()
