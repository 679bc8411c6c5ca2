"""An OTLP/gRPC trace receiver on loopback, for tests."""

from __future__ import annotations

from collections import Counter
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from specmesh.config import TelemetrySettings


@dataclass(frozen=True)
class Received:
    """One exported span with the service that sent it and its attributes as plain values."""

    service: str
    span: SpanMessage
    attributes: dict[str, object]


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that was exported to it. Use as a context manager."""

    spans: list[Received] = field(default_factory=list)
    port: int = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(
                item.value.string_value
                for item in resource.resource.attributes
                if item.key == "service.name"
            )
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: _value(item.value) for item in span.attributes}
                    self.spans.append(Received(service, span, attributes))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def settings(self) -> TelemetrySettings:
        """Settings that export here."""
        return TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{self.port}")

    def by_trace(self, trace_id: str) -> list[Received]:
        """Spans of one trace."""
        return [one for one in self.spans if one.span.trace_id.hex() == trace_id]

    def names(self, trace_id: str) -> Counter[str]:
        """How often each span name occurs in a trace."""
        return Counter(one.span.name for one in self.by_trace(trace_id))

    def __enter__(self) -> OtlpReceiver:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()


def _value(value: object) -> object:
    chosen = value.WhichOneof("value")  # type: ignore[attr-defined]  # AnyValue
    found = getattr(value, chosen)
    if chosen == "array_value":
        return tuple(_value(item) for item in found.values)
    return found
