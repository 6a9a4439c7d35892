from support.commands import amp_ray, refused, small

__all__ = ["amp_ray", "refused", "small"]
