from support.commands import amp_ray, small

__all__ = ["amp_ray", "small"]
