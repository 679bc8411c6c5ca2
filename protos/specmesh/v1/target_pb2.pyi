from protos.specmesh.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Closing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSING_UNSPECIFIED: _ClassVar[Closing]
    CLOSING_RECOVERED: _ClassVar[Closing]
    CLOSING_BONUS: _ClassVar[Closing]
    CLOSING_STOPPED: _ClassVar[Closing]
CLOSING_UNSPECIFIED: Closing
CLOSING_RECOVERED: Closing
CLOSING_BONUS: Closing
CLOSING_STOPPED: Closing

class TargetServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _session_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class TargetServiceLinkRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class TargetServiceLinkResponse(_message.Message):
    __slots__ = ("results", "load")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[TargetResult]
    load: _session_pb2.ServiceLoad
    def __init__(self, results: _Optional[_Iterable[_Union[TargetResult, _Mapping]]] = ..., load: _Optional[_Union[_session_pb2.ServiceLoad, _Mapping]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "trace", "open", "verify", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    trace: _session_pb2.TraceContext
    open: _session_pb2.OpenSession
    verify: Verify
    close: _session_pb2.CloseSession
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., trace: _Optional[_Union[_session_pb2.TraceContext, _Mapping]] = ..., open: _Optional[_Union[_session_pb2.OpenSession, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("prefix", "candidates", "distributions", "decide_at", "num_steps", "audit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    DECIDE_AT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    prefix: _session_pb2.PrefixUpdate
    candidates: _containers.RepeatedScalarFieldContainer[int]
    distributions: _containers.RepeatedCompositeFieldContainer[_session_pb2.Distribution]
    decide_at: _session_pb2.DecideAt
    num_steps: int
    audit: bool
    def __init__(self, prefix: _Optional[_Union[_session_pb2.PrefixUpdate, _Mapping]] = ..., candidates: _Optional[_Iterable[int]] = ..., distributions: _Optional[_Iterable[_Union[_session_pb2.Distribution, _Mapping]]] = ..., decide_at: _Optional[_Union[_session_pb2.DecideAt, str]] = ..., num_steps: _Optional[int] = ..., audit: _Optional[bool] = ...) -> None: ...

class TargetResult(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "opened", "verdict", "closed", "deferred", "error", "before", "after", "timing")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    opened: _session_pb2.SessionOpened
    verdict: Verdict
    closed: _session_pb2.SessionClosed
    deferred: _session_pb2.Deferred
    error: _session_pb2.CommandError
    before: _session_pb2.Boundaries
    after: _session_pb2.Boundaries
    timing: _session_pb2.StepTiming
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., opened: _Optional[_Union[_session_pb2.SessionOpened, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., closed: _Optional[_Union[_session_pb2.SessionClosed, _Mapping]] = ..., deferred: _Optional[_Union[_session_pb2.Deferred, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.CommandError, _Mapping]] = ..., before: _Optional[_Union[_session_pb2.Boundaries, _Mapping]] = ..., after: _Optional[_Union[_session_pb2.Boundaries, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("num_accepted", "tokens", "closing", "distributions", "logprobs", "judged", "emitted", "redraw_mismatch", "more", "offset")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    REDRAW_MISMATCH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    closing: Closing
    distributions: _containers.RepeatedCompositeFieldContainer[_session_pb2.Distribution]
    logprobs: _containers.RepeatedCompositeFieldContainer[_session_pb2.TokenLogprobs]
    judged: _containers.RepeatedCompositeFieldContainer[JudgedCandidate]
    emitted: _containers.RepeatedCompositeFieldContainer[EmittedToken]
    redraw_mismatch: int
    more: bool
    offset: int
    def __init__(self, num_accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., closing: _Optional[_Union[Closing, str]] = ..., distributions: _Optional[_Iterable[_Union[_session_pb2.Distribution, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[_session_pb2.TokenLogprobs, _Mapping]]] = ..., judged: _Optional[_Iterable[_Union[JudgedCandidate, _Mapping]]] = ..., emitted: _Optional[_Iterable[_Union[EmittedToken, _Mapping]]] = ..., redraw_mismatch: _Optional[int] = ..., more: _Optional[bool] = ..., offset: _Optional[int] = ...) -> None: ...

class JudgedCandidate(_message.Message):
    __slots__ = ("target_prob", "draft_prob", "overlap")
    TARGET_PROB_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROB_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    target_prob: float
    draft_prob: float
    overlap: float
    def __init__(self, target_prob: _Optional[float] = ..., draft_prob: _Optional[float] = ..., overlap: _Optional[float] = ...) -> None: ...

class EmittedToken(_message.Message):
    __slots__ = ("is_argmax", "max_prob")
    IS_ARGMAX_FIELD_NUMBER: _ClassVar[int]
    MAX_PROB_FIELD_NUMBER: _ClassVar[int]
    is_argmax: bool
    max_prob: float
    def __init__(self, is_argmax: _Optional[bool] = ..., max_prob: _Optional[float] = ...) -> None: ...
