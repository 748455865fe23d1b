"""`python -m services.main_decode`."""

from pdd.config import StageSettings
from pdd.process import run
from pdd.types import Role
from services.main_decode.wiring import serve

if __name__ == "__main__":
    run(StageSettings, Role.MAIN_DECODE, serve)
