"""The export's string table, and the names of one capture."""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_k25_instrument.analysis.capture import CaptureError, Int64
from vllm_k25_instrument.analysis.nsys.database import EXPORT_AGAIN, Database

NO_NAME: Final = -1


class Names:
    """The names of an export's captures, each once; a name's code is its index in `listed`."""

    def __init__(self) -> None:
        self.listed: list[str] = []
        self.undecodable = 0
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        """The code of `name`, new where it is new."""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.listed)
            self.listed.append(name)
        return code

    def code_of(self, text: object) -> int:
        """The code of a text as SQLite gave it (bytes, or whatever stands in a column of text); `NO_NAME` for none."""
        if text is None or text == b"":
            return NO_NAME
        if not isinstance(text, bytes):
            return self.code(str(text))
        try:
            return self.code(text.decode())
        except UnicodeDecodeError:
            self.undecodable += 1
            return self.code(text.decode("utf-8", "replace"))


class Strings:
    """``StringIds`` of an export: ids into codes of `Names`."""

    def __init__(self, database: Database, names: Names) -> None:
        """Raises `CaptureError` where the export has no such table: without it nothing has a name."""
        table = database.table("StringIds")
        if table is None or "id" not in table or "value" not in table:
            raise CaptureError(
                database.path,
                "table StringIds is missing, so nothing in it has a name"
                if table is None
                else "table StringIds is broken",
                f"{EXPORT_AGAIN}, without a selection of tables",
            )
        self._database = database
        self._table = table
        self._names = names
        self._ids = np.unique(database.rows(table, ("id",), {})["id"])
        self._codes: dict[int, int] = {}

    def resolve(self, ids: Int64) -> Int64:
        """The code of each id; `NO_NAME` for ids that lead nowhere or to an empty text. Fetches only what is used."""
        distinct, inverse = np.unique(ids, return_inverse=True)
        known = np.isin(distinct, self._ids, assume_unique=True)
        fetch = [int(key) for key in distinct[known] if int(key) not in self._codes]
        for key, value in self._database.lookup(self._table, "id", "value", fetch):
            if isinstance(key, int):
                self._codes[key] = self._names.code_of(value)
        codes = np.fromiter((self._codes.get(int(key), NO_NAME) for key in distinct), np.int64, len(distinct))
        return codes[inverse] if len(distinct) else np.zeros(0, np.int64)
