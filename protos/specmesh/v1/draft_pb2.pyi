from protos.specmesh.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _session_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class DraftServiceLinkRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DraftCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DraftCommand, _Mapping]]] = ...) -> None: ...

class DraftServiceLinkResponse(_message.Message):
    __slots__ = ("results", "load")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[DraftResult]
    load: _session_pb2.ServiceLoad
    def __init__(self, results: _Optional[_Iterable[_Union[DraftResult, _Mapping]]] = ..., load: _Optional[_Union[_session_pb2.ServiceLoad, _Mapping]] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "trace", "open", "propose", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    trace: _session_pb2.TraceContext
    open: _session_pb2.OpenSession
    propose: Propose
    close: _session_pb2.CloseSession
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., trace: _Optional[_Union[_session_pb2.TraceContext, _Mapping]] = ..., open: _Optional[_Union[_session_pb2.OpenSession, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("prefix", "num_draft_tokens", "num_ahead")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    prefix: _session_pb2.PrefixUpdate
    num_draft_tokens: int
    num_ahead: int
    def __init__(self, prefix: _Optional[_Union[_session_pb2.PrefixUpdate, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., num_ahead: _Optional[int] = ...) -> None: ...

class DraftResult(_message.Message):
    __slots__ = ("session_id", "epoch", "round", "opened", "proposal", "closed", "deferred", "error", "ahead", "before", "after", "timing")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round: int
    opened: _session_pb2.SessionOpened
    proposal: Proposal
    closed: _session_pb2.SessionClosed
    deferred: _session_pb2.Deferred
    error: _session_pb2.CommandError
    ahead: Ahead
    before: _session_pb2.Boundaries
    after: _session_pb2.Boundaries
    timing: _session_pb2.StepTiming
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., opened: _Optional[_Union[_session_pb2.SessionOpened, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., closed: _Optional[_Union[_session_pb2.SessionClosed, _Mapping]] = ..., deferred: _Optional[_Union[_session_pb2.Deferred, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.CommandError, _Mapping]] = ..., ahead: _Optional[_Union[Ahead, _Mapping]] = ..., before: _Optional[_Union[_session_pb2.Boundaries, _Mapping]] = ..., after: _Optional[_Union[_session_pb2.Boundaries, _Mapping]] = ..., timing: _Optional[_Union[_session_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class Ahead(_message.Message):
    __slots__ = ("continuations",)
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    def __init__(self, continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("num_accepted", "closing_token", "proposal")
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    num_accepted: int
    closing_token: int
    proposal: Proposal
    def __init__(self, num_accepted: _Optional[int] = ..., closing_token: _Optional[int] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("tokens", "distributions", "dropped_mass", "is_cut")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_MASS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    distributions: _containers.RepeatedCompositeFieldContainer[_session_pb2.Distribution]
    dropped_mass: _containers.RepeatedScalarFieldContainer[float]
    is_cut: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., distributions: _Optional[_Iterable[_Union[_session_pb2.Distribution, _Mapping]]] = ..., dropped_mass: _Optional[_Iterable[float]] = ..., is_cut: _Optional[bool] = ...) -> None: ...
