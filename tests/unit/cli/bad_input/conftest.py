from support.commands import refused

__all__ = ["refused"]
