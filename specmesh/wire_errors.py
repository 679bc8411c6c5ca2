"""Errors across the wire: `specmesh/errors.py` to gRPC statuses, and back to the same class.

Owns both directions, for a call that fails as a whole and for `CommandError`, which carries the
error of one session inside a link frame; and the interceptor that ends a call with what its method
raised. Must not know servers or channels (`specmesh/rpc.py`). Canonical statuses:
google/rpc/code.proto; details: google/rpc/error_details.proto.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.specmesh.v1 import session_pb2
from specmesh.errors import (
    BY_REASON,
    MAX_DETAIL_BYTES,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    PrefixMismatch,
    SessionNotFound,
    SpecmeshError,
    TooBusy,
    Unauthenticated,
)

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "specmesh"
DETAILS_KEY = "grpc-status-details-bin"
# The text travels twice (grpc-message and details); half each keeps both within the limit.
MAX_MESSAGE_TEXT_BYTES = MAX_DETAIL_BYTES // 2
MAX_FIELD_BYTES, MAX_DESCRIPTION_BYTES = 256, 512  # of the part of a request that is wrong

# Where gRPC puts the identities of a peer's certificate.
PEER_KEYS = ("peer_spiffe_id", "x509_subject_alternative_name")

# ---------------------------------------------------------------- errors -> wire


def cut(text: str, max_bytes: int = MAX_MESSAGE_TEXT_BYTES) -> str:
    """At most `max_bytes` bytes of UTF-8, never splitting a character."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."


def status_of(error: SpecmeshError) -> status_pb2.Status:
    """The rich status of an error: ErrorInfo always, RetryInfo and BadRequest where they apply."""
    message = cut(error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if isinstance(error, PrefixMismatch):
        info.metadata["confirmed_len"] = str(error.confirmed_len)
    details: list[Any] = [info]
    if error.retry_after_s > 0:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field, MAX_FIELD_BYTES),
            description=cut(error.message, MAX_DESCRIPTION_BYTES),
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpecmeshError) -> NoReturn:
    """End the call with the error's rich status. Does not return."""
    aio_context: Any = context  # its stub lacks abort_with_status
    await aio_context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status returned")


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """In the place of a request whose bytes are no message."""

    reason: str


def _parsed_or_unreadable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Let a call with unreadable bytes reach the mapping of errors.

    gRPC itself answers UNKNOWN with the exception's text, and writes a traceback each time.
    """

    def parse_request(content: bytes) -> Any:
        try:
            return parse(content)
        except DecodeError as error:
            return _Unreadable(str(error))

    return parse_request


class ErrorMapping(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Maps errors that a specmesh method raises to rich statuses: one wrap a call, none a message.

    Anything that is not a `SpecmeshError` is a bug: INTERNAL for the caller, traceback in the log.
    Callers whose certificate names none of allowed_peers (where given) get PERMISSION_DENIED.
    """

    def __init__(self, allowed_peers: Sequence[str] = ()) -> None:
        self._allowed_peers = frozenset(allowed_peers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the behaviour of one specmesh method; others pass untouched."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/specmesh."):
            return handler
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not handler.request_streaming:
            codecs["request_deserializer"] = _parsed_or_unreadable(handler.request_deserializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._mapped(handler.unary_unary), **codecs)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._mapped(handler.unary_stream), **codecs
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._mapped(handler.stream_stream), **codecs
            )
        return handler

    def _mapped(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def generating(
                request: Any, context: grpc.aio.ServicerContext[Any, Any]
            ) -> AsyncIterator[Any]:
                try:
                    self._check(request, context)
                    async for response in behaviour(request, context):
                        yield response
                except Exception as error:  # noqa: BLE001 - the one place that maps every error
                    await _abort_any(context, error)

            return generating

        async def calling(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                self._check(request, context)
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 - the one place that maps every error
                await _abort_any(context, error)

        return calling

    def _check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._check_peer(context)
        if isinstance(request, _Unreadable):
            raise InvalidRequest(f"the request cannot be parsed: {request.reason}")

    def _check_peer(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if not self._allowed_peers:
            return
        auth: Any = context.auth_context()
        identities = {value.decode() for key in PEER_KEYS for value in auth.get(key, ())}
        if not identities & self._allowed_peers:
            raise PermissionDenied("the peer's certificate names no identity that may call")


async def _abort_any(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, SpecmeshError):
        await abort(context, error)
    logger.error("call failed on a bug", exc_info=error)
    await abort(context, InternalError(f"unexpected {type(error).__name__}; see the service's log"))


def error_to_message(error: SpecmeshError) -> session_pb2.CommandError:
    """An error of one session's command, as it travels inside a link frame."""
    message = session_pb2.CommandError(
        reason=error.reason,
        message=cut(error.message),
        field=cut(error.field, MAX_FIELD_BYTES),
        retry_after_us=round(error.retry_after_s * 1e6),
    )
    if isinstance(error, PrefixMismatch):
        message.confirmed_len = error.confirmed_len
        message.page_digests.extend(
            session_pb2.PageDigest(prefix_len=length, digest=digest)
            for length, digest in error.page_digests
        )
    return message


# ---------------------------------------------------------------- wire -> errors

# How gRPC words a message or metadata over a limit. It says RESOURCE_EXHAUSTED, as a full queue
# does, but here trying again is of no use.
_OVER_LIMIT = ("message larger than max", "metadata size exceeds")

# What a bare status means, where the peer (or gRPC itself) attached no ErrorInfo of ours.
_BARE_STATUS: dict[grpc.StatusCode, type[SpecmeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: SessionNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooBusy,
    grpc.StatusCode.UNAVAILABLE: NotReady,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    # A server that stops cancels calls that reach it in that moment. (What this process cancels
    # itself, grpc.aio raises as CancelledError; what we cancel on purpose carries ErrorInfo.)
    grpc.StatusCode.CANCELLED: NotReady,
}


def _rebuild(
    reason: str, message: str, field: str, retry_after_s: float, **facts: Any
) -> SpecmeshError:
    """The class a reason names. An unknown reason (a newer peer) is an InternalError naming it."""
    cls = BY_REASON.get(reason)
    if cls is None:
        return InternalError(f"{reason}: {message}", field=field, retry_after_s=retry_after_s)
    if issubclass(cls, PrefixMismatch):
        return cls(message, field=field, retry_after_s=retry_after_s, **facts)
    return cls(message, field=field, retry_after_s=retry_after_s)


def error_from_message(message: session_pb2.CommandError) -> SpecmeshError:
    """The error a `CommandError` carries, as the class that was raised."""
    return _rebuild(
        message.reason,
        message.message,
        message.field,
        message.retry_after_us / 1e6,
        confirmed_len=message.confirmed_len,
        page_digests=tuple((page.prefix_len, page.digest) for page in message.page_digests),
    )


def error_from_rpc(error: grpc.aio.AioRpcError) -> SpecmeshError:
    """The error a call failed with, as the class raised; a bare status maps by its code."""
    text = error.details() or error.code().name
    status = _rich_status(error)
    if status is None:
        return _bare_error(error.code(), text)
    info, retry, bad = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.BadRequest(),
    )
    for detail in status.details:
        for target in (info, retry, bad):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    if info.domain != ERROR_DOMAIN:
        return _bare_error(error.code(), text)
    confirmed = info.metadata.get("confirmed_len", "0")
    return _rebuild(
        info.reason,
        status.message,
        bad.field_violations[0].field if bad.field_violations else "",
        retry.retry_delay.ToNanoseconds() / 1e9,
        confirmed_len=int(confirmed) if confirmed.isdecimal() else 0,
    )


def _bare_error(code: grpc.StatusCode, text: str) -> SpecmeshError:
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and any(part in text for part in _OVER_LIMIT):
        return InvalidRequest(text)
    return _BARE_STATUS.get(code, InternalError)(f"{code.name}: {text}")


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    # rpc_status.from_call does not take an AioRpcError, hence by hand.
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(bytes(value))
            except DecodeError:  # a peer's garbage; the bare status still speaks
                return None
    return None
