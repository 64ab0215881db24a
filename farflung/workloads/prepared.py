"""Which store a run's data is in: one that the user names, or one in the cache, made there by whoever is first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from farflung import formats
from farflung.errors import UserError, disk_errors
from farflung.files import write_text
from farflung.workloads import chat_store, store, text
from farflung.workloads.far import is_far
from farflung.workloads.lost import Lost, warn_of
from farflung.workloads.progress import bar
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.store import Store, Told
from farflung.workloads.tokenizers import Tokenizer

CACHE = "FARFLUNG_CACHE"
"""The environment variable that says where stores are kept; unset: farflung, in the user's cache folder."""
LOCK = "lock"
"""A file that is there while a process makes a store in a folder of the user's."""
LONGEST_S = 24 * 3600.0
"""Seconds to wait for another process that makes a store."""


def cache() -> Path:
    """The folder that stores are kept in; one of a temporary kind where the usual one cannot be written to."""
    if given := os.environ.get(CACHE):
        return Path(given).expanduser()
    try:
        usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "farflung"
        usual.mkdir(parents=True, exist_ok=True)
        if os.access(usual, os.W_OK):
            return usual
    except (OSError, RuntimeError):  # the latter where the user has no home
        pass
    return Path(tempfile.gettempdir()) / f"farflung-{os.getuid()}"


def is_prepared(settings: LanguageSettings) -> bool:
    """Whether the data is what `farflung prepare` has made."""
    return store.is_store(Path(settings.data).expanduser())


def store_of(
    settings: LanguageSettings,
    tokenizer: Tokenizer,
    told: Told | None = None,
    numbered: bool = False,
    as_chats: bool = False,
) -> Store:
    """The store of a run's text or chats, made if there is none; `numbered` as for `store.write`. Raises UserError.

    A terminal shows how far that is, unless somebody else is `told`.
    """
    if is_prepared(settings):
        found = store.read(Path(settings.data).expanduser())
        _refuse_other(found, tokenizer, as_chats)
        return _told(found)
    kept = cache()
    by = [1 if numbered else formats.STORE.version, tokenizer.digest, settings.text_column, settings.max_tokens]
    by += ["chats", tokenizer.template] if as_chats else []
    with disk_errors(f"keep tokens in {kept}", f"make room, or set {CACHE} to another folder"):
        seen = _seen(settings.data)
        folder = kept / "tokens" / _name(settings.data, seen, by, kept)
        # Who finds it whole needs no lock, so that many processes start at once, from a folder that is read only, too.
        if found_whole := store.whole(folder):
            return _told(found_whole)
        with _alone(folder):
            if made_meanwhile := store.whole(folder):
                return _told(made_meanwhile)
            with _shown(settings.data, told) as tell:
                made = make(folder, settings, tokenizer, tell, numbered, as_chats)
            if _seen(settings.data) != seen:  # later runs would find it by what the files held before
                shutil.rmtree(folder)
                raise UserError(
                    f"data {settings.data}: was written to while tokens were made of it; begin again when it is whole"
                )
            return made


def _told(found: Store) -> Store:
    """A store that was made before, after a warning of what of its text was lost then."""
    warn_of(found.manifest.lost)
    return found


def _shown(data: str, told: Told | None) -> contextlib.AbstractContextManager[Told]:
    if told or text.is_small(data):
        return contextlib.nullcontext(told or (lambda *_: None))
    return bar(text.text_bytes(data))


def _refuse_other(found: Store, tokenizer: Tokenizer, as_chats: bool) -> None:
    """Raises UserError for a store whose tokens are another tokenizer's, or of another kind than is wanted."""
    remedy = "with --tokenizer as it is given here, or give the one that it was made with"
    if found.manifest.tokenizer != tokenizer.digest:
        raise UserError(
            f"data {found.folder}: its tokens are not of the model's tokenizer; prepare the text again {remedy}"
        )
    if bool(found.manifest.template) != as_chats:
        raise UserError(f"data {found.folder}: is a store of chats, and text is needed here; give text")
    if as_chats and found.manifest.template != tokenizer.template:
        raise UserError(
            f"data {found.folder}: its chats are of another chat template than the tokenizer has now; "
            f"prepare them again {remedy}"
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits for whoever makes a store; the system ends the wait with that process."""
    lock = folder.with_name(f"{folder.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=LONGEST_S):
            yield
    except Timeout as error:
        raise UserError(f"another process has {lock} for a day; end it") from error


def prepare(folder: Path, settings: LanguageSettings, tokenizer: Tokenizer, told: Told, as_chats: bool) -> Store:
    """Makes a store in a folder of the user's, or goes on with one.

    Raises UserError where there is no text, a whole store, or another process that makes one, and OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    try:
        with FileLock(lock, timeout=0):
            try:
                refuse_whole(folder)
                return make(folder, settings, tokenizer, told, as_chats=as_chats)
            finally:
                lock.unlink(missing_ok=True)
    except Timeout as error:
        raise UserError(
            f"another process makes a store in {folder}; wait for it, or give another folder with --out"
        ) from error


def refuse_whole(folder: Path) -> None:
    """Raises UserError for a folder that a whole store is in."""
    if store.is_store(folder):
        raise UserError(f"{folder} holds a whole store; give another folder with --out, or remove it")


def make(
    folder: Path,
    settings: LanguageSettings,
    tokenizer: Tokenizer,
    told: Told,
    numbered: bool = False,
    as_chats: bool = False,
) -> Store:
    """Makes a store of a run's data, or goes on with one. Raises UserError where there is no text, and OSError."""
    (folder / store.MANIFEST).unlink(missing_ok=True)  # of one that is damaged
    most = settings.max_tokens
    try:
        if as_chats:
            made = chat_store.write(folder, chat_store.chats_of(settings), tokenizer, most, told)
        else:
            lost = Lost(settings.text_column)
            documents = text.documents(settings.data, settings.text_column, lost)
            made = store.write(folder, documents, tokenizer, most, told, numbered, lost.told)
    except UserError:
        if not (folder / store.PROGRESS).exists():  # which a later attempt goes on from
            shutil.rmtree(folder)
        raise
    if not made.manifest.documents:
        shutil.rmtree(folder)
        raise text.no_text(settings.data)
    return made


def _seen(data: str) -> list[list[object]]:
    """The data's files here, and what changes when they do, as far as that is told without reading them."""
    paths = [] if is_far(data) else text.files(data)
    return [[str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in paths]


def _name(data: str, seen: list[list[object]], by: list[object], kept: Path) -> str:
    """Follows from what the data's files hold, and from all else that its tokens depend on.

    Files that were seen before, of the same size and time, are not read for it again.
    """
    if is_far(data):
        return _hash([*by, text.version_of(data)])
    note = kept / "seen" / _hash([*by, seen])
    if note.exists():
        return note.read_text("utf-8")
    name = _hash([*by, [[path.suffix, _content(path)] for path in text.files(data)]])
    with contextlib.suppress(OSError):  # a cache that can only be read may have the store all the same
        write_text(note, name)
    return name


def _hash(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _content(path: Path) -> str:
    with disk_errors(f"read {path}", "see that the file can be read"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
