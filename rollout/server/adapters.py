"""Adapters come and go while the server runs: from a folder or an upload, checked before the engine sees them."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from miles_k3.adapters.content import content_sha256
from miles_k3.adapters.peft_config import CONFIG_FILE
from miles_k3.adapters.peft_io import TENSOR_FILE, load_peft
from miles_k3.adapters.update import make_update
from miles_k3.errors import AdapterError, remedy
from miles_k3.k3.config import K3Config
from miles_k3.rollout.server.backend import Backend
from miles_k3.rollout.server.errors import ApiError
from miles_k3.rollout.server.names import Names, Served
from miles_k3.types import AdapterUpdate

log = logging.getLogger(__name__)

RETRY_S = 2


class Adapters:
    """One change at a time; requests go on meanwhile. `root`: folders outside it are not read for clients."""

    def __init__(self, backend: Backend, config: K3Config, names: Names, root: Path) -> None:
        self._backend, self._config, self.names, self._root = backend, config, names, root.resolve()
        self._changing = asyncio.Lock()

    def folder_below_root(self, path: str) -> Path:
        """Raises ApiError 403 for a path that leads out of the root or that the server may not read, 404 for one that
        leads nowhere."""
        if "\0" in path:
            raise ApiError(400, "path has a zero byte", param="path")
        try:
            folder = (self._root / path).resolve()
            is_folder = folder.is_dir()
        except OSError as e:
            raise _unreadable(path, e) from e
        if not folder.is_relative_to(self._root):
            raise ApiError(403, f"{path} is not below the server's --adapter-root", param="path")
        if not is_folder:
            raise ApiError(404, f"{path}: no such folder below the server's --adapter-root", param="path")
        return folder

    async def load(
        self, folder: Path, *, name: str | None, version: int | None, pin: bool, source: str
    ) -> tuple[Served, list[int]]:
        """The adapter as served, and the versions that gave way to it.

        Raises ApiError: 400 for a folder that holds no adapter of this model, 403 for one that may not be read, 409
        when the version is not the next one or every slot is in use.
        """
        if name is not None:
            self.names.judge_name(name)
        async with self._changing:
            version = await self._next_version() if version is None else version
            try:
                update, weights_sha256 = await asyncio.to_thread(_read, folder, self._config, version)
            except AdapterError as e:
                raise ApiError(400, str(e).replace(str(folder), source), code="bad_adapter") from e
            except OSError as e:
                raise _unreadable(source, e) from e
            if update.config.rank > self._backend.max_rank:
                raise ApiError(
                    400,
                    f"{source} has rank {update.config.rank}, this server's slots hold {self._backend.max_rank} "
                    "(--max-lora-rank)",
                    code="bad_adapter",
                )
            try:
                await self._backend.load(update, pin=pin)
            except AdapterError as e:
                raise ApiError(409, str(e), code="adapter_conflict", retry_after_s=RETRY_S) from e
            served = Served(
                version=version, name=name, rank=update.config.rank, alpha=update.config.alpha, sha256=update.sha256,
                weights_sha256=weights_sha256, source=source, pinned=pin,
            )  # fmt: skip
            self.names.add(served)
            gone = self.names.keep(await self._backend.live_versions())
            return self.names.get(version), gone

    async def unload(self, version: int) -> Served:
        """Nobody can ask for it from now on; who asked before is served to the end. Raises ApiError 404."""
        async with self._changing:
            served = self.names.remove(version)
            if served.pinned:
                await self._backend.pin(version, False)
            return served

    async def pin(self, version: int, pinned: bool) -> Served:
        """Keep a version from being replaced, or let it go. Raises ApiError 404."""
        async with self._changing:
            if self.names.get(version).pinned != pinned:
                await self._backend.pin(version, pinned)
            return self.names.pin(version, pinned)

    async def _next_version(self) -> int:
        return await self._backend.engine_version() + 1


def _read(folder: Path, config: K3Config, version: int) -> tuple[AdapterUpdate, str]:
    """The update, and the hash of its weights alone."""
    adapter, tensors = load_peft(folder, config)
    update = make_update(version, adapter, tensors)
    return update, content_sha256(adapter, update.tensors)


@asynccontextmanager
async def uploaded(body: AsyncIterator[bytes]) -> AsyncIterator[Path]:
    """A folder with the adapter of a tar archive, for as long as the block lasts.

    Raises ApiError: 400 for another body, 507 where the disk is full, 500 where it refuses for another reason.
    """
    with _kept():
        parent = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="miles-k3-adapter-"))
    try:
        folder = parent / "adapter"
        with _kept():
            archive = parent / "upload.tar"
            with archive.open("wb") as file:
                async for chunk in body:
                    await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(_unpack, archive, folder)
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, parent, ignore_errors=True)


@contextmanager
def _kept() -> Iterator[None]:
    """What the disk refuses, told without the server's own paths; those are in its log."""
    try:
        yield
    except OSError as e:
        log.error("an upload can't be kept in %s: %s", tempfile.gettempdir(), e)
        raise ApiError(
            507 if e.errno in (errno.ENOSPC, errno.EDQUOT) else 500,
            f"the server can't keep the upload in its temporary folder ({e.strerror or type(e).__name__}); its "
            f"operator should {remedy(e, 'another TMPDIR', 'look into its log')}",
            code="upload_not_kept",
        ) from e


def _unreadable(source: str, error: OSError) -> ApiError:
    refused = isinstance(error, PermissionError)
    advice = "; change its permissions, or name another folder" if refused else ""
    return ApiError(
        403 if refused else 400,
        f"{source} can't be read ({error.strerror or type(error).__name__}){advice}",
        code="unreadable_adapter",
        param="path",
    )


def _unpack(archive: Path, folder: Path) -> None:
    """The two files of a PEFT folder and nothing else; links, and files of other names, are refused."""
    folder.mkdir()
    wanted = {CONFIG_FILE, TENSOR_FILE}
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isdir() and name in ("", "."):
                    continue
                if not member.isfile() or name not in wanted or (folder / name).exists():
                    raise ApiError(
                        400,
                        f"the archive holds {member.name!r}; expected the files {CONFIG_FILE} and {TENSOR_FILE} at "
                        "its top, each once, and nothing else",
                        code="bad_adapter",
                    )
                source = tar.extractfile(member)
                assert source is not None
                with source, (folder / name).open("xb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (tarfile.TarError, EOFError) as e:
        raise ApiError(
            400, f"the body is not a whole, uncompressed tar archive ({e}); make it with tar -cf", code="bad_adapter"
        ) from e
