"""On PYTHONPATH this makes vLLM one that has renamed something: RENAMED_IN_VLLM="old=new,old=new"."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

RENAMED = [pair.split("=") for pair in os.environ.get("RENAMED_IN_VLLM", "").split(",") if pair]
WORD = re.compile(r"\b({})\b".format("|".join(old for old, _ in RENAMED)).encode())
NEW = {old.encode(): new.encode() for old, new in RENAMED}


class RenamingLoader(SourceFileLoader):
    """Compiles a source after renaming in it; one without such a name is loaded as ever."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if not WORD.search(source):
            return super().get_code(fullname)
        return self.source_to_code(WORD.sub(lambda match: NEW[match[1]], source), path)


class RenamingFinder(PathFinder):
    """Finds vLLM's own modules."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = RenamingLoader(spec.loader.name, spec.loader.path)
        return spec


if RENAMED:
    sys.meta_path.insert(0, RenamingFinder)
