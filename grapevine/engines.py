"""Which engine the settings come to on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from common.settings import Settings, SettingsError
from generators.engines.base import Engine

Kind = Literal["vllm", "transformers", "paced"]


def engine_kind(settings: Settings, exact: bool = False) -> Kind:
    """What `generators.engine` comes to here; `exact` as in `make_engine`.

    Raises SettingsError when it is not installed, or has none of the options that are set.
    """
    pool = settings.generators
    has_vllm = find_spec("vllm") is not None
    if pool.engine == "vllm" and not has_vllm:
        raise SettingsError(
            "setting generators.engine: vllm is not installed here; `make setup-vllm` makes .venv-vllm, which has it, and "
            "transformers needs nothing more"
        )
    kind: Kind = ("vllm" if has_vllm and not exact else "transformers") if pool.engine == "auto" else pool.engine
    meant_for_vllm = pool.engine == "auto" and has_vllm
    if kind == "transformers" and pool.engine_options and not meant_for_vllm:
        asked = ", ".join(pool.engine_options)
        raise SettingsError(
            f"setting generators.engine_options: the transformers engine has no options ({asked}); leave them out, or set "
            "generators.engine=vllm"
        )
    return kind


def make_engine(settings: Settings, exact: bool = False) -> Engine:
    """The engine that the settings ask for.

    `exact`: where they leave it open, one whose answers never depend on what else is in the batch.
    Raises SettingsError as `engine_kind` does, and for options that the engine does not know.
    """
    pool, kind = settings.generators, engine_kind(settings, exact)
    if kind == "vllm":
        from generators.engines.vllm.engine import VllmEngine

        return VllmEngine(pool.device, pool.dtype, pool.engine_options)
    if kind == "paced":
        from generators.engines.paced import PacedEngine

        try:
            return PacedEngine(**pool.engine_options)
        except TypeError as error:
            raise SettingsError(f"setting generators.engine_options: {error}") from None
    from generators.engines.transformers import TransformersEngine

    return TransformersEngine(pool.device, pool.dtype, pool.models_kept)
