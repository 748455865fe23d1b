"""`python -m services.prefill`."""

from pdd.config import StageSettings
from pdd.process import run
from pdd.types import Role
from services.prefill.wiring import serve

if __name__ == "__main__":
    run(StageSettings, Role.PREFILL, serve)
