"""JSON files that a stranger may have made: plain, bounded, of the expected form."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mamba3lite.files import open_plain


class Checked(BaseModel):
    """JSON values of exactly these types; further keys are left alone."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, le=10**15)]


def read_json(path: Path, inside: Path, most_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of the folder `inside`.

    Raises: OSError as `open_plain`; ValueError, one line without the path, for a file
    of more than `most_bytes`, and for what is no JSON object with each key once.
    """
    with open_plain(path, inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"larger than {most_bytes:,} bytes")
        data = file.read(size)
    return parse_object(data)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that some bytes spell; raises ValueError as `read_json`."""
    try:
        value = json.loads(
            data, object_pairs_hook=_each_key_once, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("wants a JSON object")
    return value


def require_form(value: dict[str, Any], form: type[BaseModel]) -> None:
    """ValueError, one line, that names the first part which is missing or wrong."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        raise ValueError(_said(error.errors(include_url=False)[0])) from None


def shown(value: Any, most: int = 60) -> str:
    """A value of a stranger in a message: on one line, without escapes, cut."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _said(error: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{place} is missing"
    wanted = error["msg"].replace("Input should be", "should be")
    wanted = re.sub(r" or instance of \w+", "", wanted)
    return f"{place}: got {shown(error['input'])}, {wanted}"


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
