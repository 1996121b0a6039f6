"""Owner of one llama.cpp model, its context and its eval callback: decode, logits.

The callback obeys docs/facts.md, 5 and 18: it never raises (an exception is stored and raised after the decode),
always returns a bool, is kept alive as long as the context, and the memory is cleared before every chunk.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from qres.errors import NativeError, UnsupportedError
from qres.native import ggml
from qres.native.graph import Graph, Recorder
from qres.native.refusals import load_error
from qres.printable import show

Floats = npt.NDArray[np.float32]


class Tap(Protocol):
    """What looks at a decode from inside the eval callback."""

    def ask(self, address: int) -> bool:
        """A node is about to be computed: should `see` be called once it is?"""

    def see(self, address: int) -> None:
        """The node is computed; it may be read and overwritten."""


@dataclass(frozen=True)
class SessionOptions:
    """Settings that must be the same for every model of a comparison (docs/facts.md, 19)."""

    n_ctx: int
    n_threads: int
    n_gpu_layers: int = 0
    flash_attention: bool = True
    """False computes attention step by step: the same model in other arithmetic, for the noise floor."""
    writable: bool = False
    """Read the weights into memory as they are, instead of mapping the file or laying them out anew: they can then be
    overwritten (`overwrite`)."""


_DEBUG_LEVEL = 1  # GGML_LOG_LEVEL_DEBUG: hundreds of lines per context, about every buffer
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


class _Log:
    """llama.cpp's messages: copied to standard error (the worker keeps it in a file), the last ones kept for errors."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on_line: Callable[[str], None] | None = None
        self._errors: list[str] = []
        self._partial = ""
        self._callback = llama_cpp.llama_log_callback(self._write)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _write(self, level: int, text: bytes, _data: object) -> None:
        if level == _DEBUG_LEVEL:
            return
        os.write(2, text)
        if level == _ERROR_LEVEL and self._partial:  # an unfinished progress line is no part of the error
            self.lines.append(self._partial)
            self._partial = ""
        *lines, self._partial = (self._partial + text.decode(errors="replace")).split("\n")
        self.lines = (self.lines + lines)[-1000:]
        if level == _ERROR_LEVEL:
            self._errors += lines
        if self.on_line:
            for line in lines:
                self.on_line(line)

    def reason(self) -> str:
        """The first error since `clear`, which is the cause of the others, without the function it comes from."""
        causes = [line for line in self._errors if line.strip()]
        line = causes[0] if causes else next((line for line in reversed(self.lines) if line.strip()), "no message")
        return re.sub(r"^\w+: (error \w+ \w+: )?", "", line.strip())

    def clear(self) -> None:
        """Forget earlier messages, so that the next reason belongs to the next call."""
        self.lines, self._errors = [], []


log = _Log()
"""One per process, because llama.cpp has one log callback per process."""
llama_cpp.llama_backend_init()


def system_info() -> str:
    """llama.cpp's line of CPU features and backends."""
    return str(llama_cpp.llama_print_system_info().decode().strip())


@contextmanager
def loaded_model(path: Path, **settings: int | bool) -> Iterator[Any]:
    """A model, freed at the end; `settings` are fields of `llama_model_params` that are not to have their defaults.

    Raises:
        QresError: llama.cpp refuses it, for its own reason, which decides the class (`refusals.load_error`).
    """
    log.clear()
    params = llama_cpp.llama_model_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise load_error(show(path.name), show(log.reason()))
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def require_backend(n_gpu_layers: int) -> None:
    """Refuse layers for a GPU that llama.cpp cannot use.

    Raises:
        UnsupportedError: it was built without a GPU backend.
    """
    if n_gpu_layers and not llama_cpp.llama_supports_gpu_offload():
        raise UnsupportedError(
            "the installed llama-cpp-python was built without a GPU backend",
            "leave --n-gpu-layers out, or build it with one",
        )


class Session:
    """A loaded model with a context. Use as a context manager; frees the context before the model."""

    def __init__(self, path: Path, options: SessionOptions, share: Session | None = None) -> None:
        """Load a model file, or make another context of a loaded one.

        Args:
            path: The model.
            options: How to run it.
            share: A session whose model is used instead of loading the file again; must outlive this one.

        Raises:
            NativeError: llama.cpp refused the file; its own last message is given.
            UnsupportedError: the model needs an encoder, or layers were to go to a GPU that llama.cpp does not have.
        """
        self.path = path
        self.options = options
        self._tap: Tap | None = None
        self._failure: BaseException | None = None
        self._stack = ExitStack()
        try:
            self._model: Any = share._model if share else self._load_model()
            self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
            self.n_embd = int(llama_cpp.llama_model_n_embd(self._model))
            self.n_layer = int(llama_cpp.llama_model_n_layer(self._model))
            self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self._model))
            self._context = self._make_context()
        except BaseException:
            self._stack.close()
            raise

    def _load_model(self) -> Any:  # noqa: ANN401 - an opaque ctypes pointer
        require_backend(self.options.n_gpu_layers)
        settings: dict[str, int | bool] = {"n_gpu_layers": self.options.n_gpu_layers}
        if self.options.writable:
            settings |= {"load_mode": llama_cpp.LLAMA_LOAD_MODE_NONE, "use_extra_bufts": False}
        model = self._stack.enter_context(loaded_model(self.path, **settings))
        if llama_cpp.llama_model_has_encoder(model):
            raise UnsupportedError(
                f"{self.path.name} is an encoder-decoder model", "qres measures decoder-only language models"
            )
        return model

    def _make_context(self) -> Any:  # noqa: ANN401 - an opaque ctypes pointer
        params = llama_cpp.llama_context_default_params()
        # One graph per decode: a chunk is never split, so every stream point is seen exactly once.
        params.n_ctx = params.n_batch = params.n_ubatch = self.options.n_ctx
        params.n_threads = params.n_threads_batch = self.options.n_threads
        if not self.options.flash_attention:
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)
        params.cb_eval = self._callback
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise NativeError(
                f"llama.cpp cannot make a context for {self.path.name}: {log.reason()}",
                "a smaller --n-ctx or fewer levels need less memory",
            )
        self._stack.callback(llama_cpp.llama_free, context)
        self._batch = llama_cpp.llama_batch_init(self.options.n_ctx, 0, 1)
        self._stack.callback(llama_cpp.llama_batch_free, self._batch)
        return context

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free batch, context and model, in this order."""
        self._stack.close()

    def decode(self, tokens: Sequence[int], tap: Tap | None = None, start: int = 0) -> Floats:
        """Run the model over tokens at positions start, start+1, ...

        Args:
            tokens: At most n_ctx token ids.
            tap: Sees (and may overwrite) the nodes it asks for.
            start: 0 clears the memory first; otherwise the tokens follow those already decoded.

        Returns:
            Logits [len(tokens), n_vocab], float32. A view of llama.cpp's buffer: valid until the next decode.

        Raises:
            NativeError: the decode failed, or computed no logits.
        """
        self.run(tokens, tap, start)
        logits = llama_cpp.llama_get_logits(self._context)
        if not logits:
            raise NativeError(f"{self.path.name}: llama.cpp computed no logits")
        view = np.ctypeslib.as_array(logits, shape=(len(tokens), self.n_vocab))
        # One row is quick to look at and tells nearly always; a token alone may well have nothing to predict from.
        if view[-1].min() == view[-1].max() and view.min() == view.max():
            raise UnsupportedError(
                f"{self.path.name}: all logits are equal ({view[-1, 0]:g})",
                "an embedding-only model, or damaged weights, has no next-token distribution to measure",
            )
        return view

    def record(self, tokens: Sequence[int], weights: frozenset[str] | None = None) -> Graph:
        """The compute graph of decoding these tokens; with the values of all leaves but these weights, if given."""
        tap = _RecordTap(Recorder(weights))
        self.run(tokens, tap)
        return tap.recorder.graph()

    def record_inputs(self, tokens: Sequence[int], weights: frozenset[str]) -> tuple[Graph, Floats]:
        """The compute graph with the values of its inputs and caches, and the logits that it computed.

        Args:
            tokens: As for `decode`.
            weights: Names of the tensors in the model file: leaves that are no inputs.

        Returns:
            The graph, and the logits [len(tokens), n_vocab], valid until the next decode.

        Raises:
            NativeError: the decode failed, or computed no logits.
        """
        tap = _RecordTap(Recorder(weights))
        logits = self.decode(tokens, tap)
        return tap.recorder.graph(), logits

    def find_weights(self, tokens: Sequence[int], names: frozenset[str]) -> dict[str, tuple[int, ...]]:
        """Where the weights lie that decoding these tokens reads, for `overwrite`.

        A tied head has two tensors of one name.
        """
        tap = _WeightsTap(names)
        self.run(tokens, tap)
        return {name: tuple(addresses) for name, addresses in tap.found.items()}

    def overwrite(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """Give a weight other values; the model must be `writable`.

        Args:
            address: From `find_weights`.
            data: All its bytes.

        Raises:
            NativeError: the model is not writable, or the tensor has another size.
        """
        if not self.options.writable:
            raise NativeError(f"{self.path.name} is mapped from its file: its weights cannot be overwritten")
        ggml.write_bytes(address, data)

    def run(self, tokens: Sequence[int], tap: Tap | None, start: int = 0) -> None:
        """As `decode`, for who wants the tap's findings and not the logits, whatever these are."""
        if not 0 < len(tokens) <= self.options.n_ctx:  # llama.cpp would abort the process (docs/facts.md, 17)
            raise NativeError(f"{len(tokens)} tokens do not fit a batch of {self.options.n_ctx}")
        if start == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._fill_batch(tokens, start)
        self._tap, self._failure = tap, None
        log.clear()
        try:
            code = llama_cpp.llama_decode(self._context, self._batch)
            llama_cpp.llama_synchronize(self._context)
        finally:
            self._tap = None
        if self._failure is not None:
            raise self._failure
        if code != 0:
            raise NativeError(f"{self.path.name}: llama_decode returned {code}: {log.reason()}")

    def _fill_batch(self, tokens: Sequence[int], start: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1  # every token, or the last layer has fewer rows than the others (docs/facts.md, 6)

    def _on_node(self, address: int, ask: bool, _data: object) -> bool:
        tap = self._tap
        if tap is None:
            return not ask
        try:
            if ask:
                return tap.ask(address)
            tap.see(address)
        except BaseException as error:
            self._failure = error
            self._tap = None
            return False
        return True


class _WeightsTap:
    """Notes the addresses of weights that nodes read, and asks for no node."""

    def __init__(self, names: frozenset[str]) -> None:
        self.found: dict[str, dict[int, None]] = {}
        self._names = names

    def ask(self, address: int) -> bool:
        for source in ggml.at(address).src:
            name = ggml.at(source).name.decode(errors="replace") if source else ""
            if name in self._names:
                self.found.setdefault(name, {})[source] = None
        return False

    def see(self, address: int) -> None:
        """Never called: nothing is asked for."""


class _RecordTap:
    """Records every node and asks for none."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def ask(self, address: int) -> bool:
        self.recorder.add(address)
        return False

    def see(self, address: int) -> None:
        """Never called: nothing is asked for."""
