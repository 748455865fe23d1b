"""`python -m services.cache`: the prefix index's front."""

from pdd.config import CacheSettings
from pdd.process import run
from pdd.types import Role
from services.cache.wiring import serve

if __name__ == "__main__":
    run(CacheSettings, Role.CACHE, serve)
