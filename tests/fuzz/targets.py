"""Every decoder of bytes from outside, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specmesh.tokenizer import load_tokenizer
from tests.fuzz import file_targets, message_targets
from tests.fuzz.fuzzer import Target
from tests.fuzz.link_targets import LinkTarget


@contextmanager
def all_targets() -> Iterator[dict[str, Target]]:
    """The targets, with scratch folders that live as long."""
    with file_targets.Folders() as folders:
        found: list[Target] = [
            LinkTarget("target"),
            LinkTarget("draft"),
            message_targets.row_target(),
            message_targets.decision_target(),
            message_targets.request_target(load_tokenizer(folders.model)),
            message_targets.response_target(),
            message_targets.status_target(),
            message_targets.TraceContextTarget(),
            *file_targets.model_targets(folders),
            *file_targets.gguf_targets(folders),
            *file_targets.trace_targets(folders),
            *file_targets.settings_targets(folders),
        ]
        yield {target.name: target for target in found}
