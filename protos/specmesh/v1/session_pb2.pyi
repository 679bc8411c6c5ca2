from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecisionRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_RULE_UNSPECIFIED: _ClassVar[DecisionRule]
    DECISION_RULE_RESIDUAL: _ClassVar[DecisionRule]
    DECISION_RULE_COUPLED: _ClassVar[DecisionRule]

class DecideAt(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECIDE_AT_UNSPECIFIED: _ClassVar[DecideAt]
    DECIDE_AT_TARGET: _ClassVar[DecideAt]
    DECIDE_AT_COORDINATOR: _ClassVar[DecideAt]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_DENSE_F32: _ClassVar[Encoding]
    ENCODING_DENSE_F16: _ClassVar[Encoding]
    ENCODING_SPARSE_F32: _ClassVar[Encoding]
    ENCODING_SPARSE_F16: _ClassVar[Encoding]

class RowPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_POLICY_UNSPECIFIED: _ClassVar[RowPolicy]
    ROW_POLICY_AUTO: _ClassVar[RowPolicy]
    ROW_POLICY_DENSE_F32: _ClassVar[RowPolicy]
    ROW_POLICY_DENSE_F16: _ClassVar[RowPolicy]
DECISION_RULE_UNSPECIFIED: DecisionRule
DECISION_RULE_RESIDUAL: DecisionRule
DECISION_RULE_COUPLED: DecisionRule
DECIDE_AT_UNSPECIFIED: DecideAt
DECIDE_AT_TARGET: DecideAt
DECIDE_AT_COORDINATOR: DecideAt
ENCODING_UNSPECIFIED: Encoding
ENCODING_DENSE_F32: Encoding
ENCODING_DENSE_F16: Encoding
ENCODING_SPARSE_F32: Encoding
ENCODING_SPARSE_F16: Encoding
ROW_POLICY_UNSPECIFIED: RowPolicy
ROW_POLICY_AUTO: RowPolicy
ROW_POLICY_DENSE_F32: RowPolicy
ROW_POLICY_DENSE_F16: RowPolicy

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("encoding", "vocab_size", "ids", "values")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    encoding: Encoding
    vocab_size: int
    ids: bytes
    values: bytes
    def __init__(self, encoding: _Optional[_Union[Encoding, str]] = ..., vocab_size: _Optional[int] = ..., ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "min_tokens", "num_logprobs")
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    num_logprobs: int
    def __init__(self, seed: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("sampling", "rule", "prompt_len", "max_len", "row_policy", "vocab_hash")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    ROW_POLICY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_HASH_FIELD_NUMBER: _ClassVar[int]
    sampling: SamplingParams
    rule: DecisionRule
    prompt_len: int
    max_len: int
    row_policy: RowPolicy
    vocab_hash: int
    def __init__(self, sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., rule: _Optional[_Union[DecisionRule, str]] = ..., prompt_len: _Optional[int] = ..., max_len: _Optional[int] = ..., row_policy: _Optional[_Union[RowPolicy, str]] = ..., vocab_hash: _Optional[int] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefixUpdate(_message.Message):
    __slots__ = ("base_len", "append_from", "append", "num_accepted", "prefix_digest", "resync")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    APPEND_FROM_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    append_from: int
    append: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    prefix_digest: int
    resync: bool
    def __init__(self, base_len: _Optional[int] = ..., append_from: _Optional[int] = ..., append: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., resync: _Optional[bool] = ...) -> None: ...

class Boundaries(_message.Message):
    __slots__ = ("confirmed_len", "kv_len", "allocated_len")
    CONFIRMED_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_LEN_FIELD_NUMBER: _ClassVar[int]
    confirmed_len: int
    kv_len: int
    allocated_len: int
    def __init__(self, confirmed_len: _Optional[int] = ..., kv_len: _Optional[int] = ..., allocated_len: _Optional[int] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("queue_us", "forward_us", "total_us", "batch_size", "cached_tokens", "num_steps", "batch_rows")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    forward_us: int
    total_us: int
    batch_size: int
    cached_tokens: int
    num_steps: int
    batch_rows: int
    def __init__(self, queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., total_us: _Optional[int] = ..., batch_size: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., num_steps: _Optional[int] = ..., batch_rows: _Optional[int] = ...) -> None: ...

class PageDigest(_message.Message):
    __slots__ = ("prefix_len", "digest")
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    prefix_len: int
    digest: int
    def __init__(self, prefix_len: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class CommandError(_message.Message):
    __slots__ = ("reason", "message", "field", "retry_after_us", "confirmed_len", "page_digests")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_US_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    field: str
    retry_after_us: int
    confirmed_len: int
    page_digests: _containers.RepeatedCompositeFieldContainer[PageDigest]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_us: _Optional[int] = ..., confirmed_len: _Optional[int] = ..., page_digests: _Optional[_Iterable[_Union[PageDigest, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "row")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    row: bytes
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., row: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("page_size",)
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    def __init__(self, page_size: _Optional[int] = ...) -> None: ...

class SessionClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Deferred(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceLoad(_message.Message):
    __slots__ = ("num_sessions", "num_waiting", "free_pages", "total_pages", "draining")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    num_waiting: int
    free_pages: int
    total_pages: int
    draining: bool
    def __init__(self, num_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "fingerprint", "architecture", "vocab_size", "vocab_hash", "bos_token_id", "eos_token_ids", "max_context_len", "max_sessions", "page_size", "total_pages", "max_num_draft_tokens", "max_message_bytes", "device", "device_id", "dtype", "numeric_contract", "tokenizer", "version", "instance_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_HASH_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    architecture: str
    vocab_size: int
    vocab_hash: int
    bos_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_context_len: int
    max_sessions: int
    page_size: int
    total_pages: int
    max_num_draft_tokens: int
    max_message_bytes: int
    device: str
    device_id: str
    dtype: str
    numeric_contract: str
    tokenizer: str
    version: str
    instance_id: str
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocab_hash: _Optional[int] = ..., bos_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_context_len: _Optional[int] = ..., max_sessions: _Optional[int] = ..., page_size: _Optional[int] = ..., total_pages: _Optional[int] = ..., max_num_draft_tokens: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., device: _Optional[str] = ..., device_id: _Optional[str] = ..., dtype: _Optional[str] = ..., numeric_contract: _Optional[str] = ..., tokenizer: _Optional[str] = ..., version: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...
