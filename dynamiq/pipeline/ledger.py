"""What a pipeline has done so far: counted call by call, reported as one value."""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamiq.core.drivers import Meter


@dataclass(frozen=True)
class Metrics:
    """Totals of one rank since the pipeline was built.

    Attributes:
        calls: Collectives that ended well, verification excluded.
        compressed_calls: Those that used the pipeline's compressor.
        bytes_sent: All bytes sent: payloads, statistics, headers, uncompressed calls.
        bytes_received: All bytes received.
        verification_bytes_sent: Bytes sent by ``verify_every``, not part of ``bytes_sent``.
        bits_per_entry: Bits sent per padded entry and pass in compressed calls, the 16-byte headers
            included (``measure_error`` leaves these out); 0 without any such call. With
            ``Hierarchical`` only what is sent between nodes counts, bits and entries.
        skips: Why calls travelled uncompressed, and how many.
        codec_s: Seconds spent in statistics, encoding and accumulation.
        wire_s: Seconds in which calls in flight waited for bytes.
        vnmse: Energy-weighted over the verified calls; None before the first.
        predicted_vnmse: What the compressor had predicted for these; None if it does not say.
        verified_calls: How many those are.
        node_bytes_sent: Those of ``bytes_sent`` that ``Hierarchical`` sent inside a node.
    """

    calls: int = 0
    compressed_calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    verification_bytes_sent: int = 0
    bits_per_entry: float = 0.0
    skips: Mapping[str, int] = field(default_factory=dict)
    codec_s: float = 0.0
    wire_s: float = 0.0
    vnmse: float | None = None
    predicted_vnmse: float | None = None
    verified_calls: int = 0
    node_bytes_sent: int = 0


class Ledger:
    """The running totals; safe to read while a worker writes."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._total = Meter()
        self._compressed_bytes = 0
        self._volume = 0.0
        self._calls = 0
        self._compressed_calls = 0
        self._skips: Counter[str] = Counter()
        self._verification_bytes = 0
        self._error = 0.0
        self._norm = 0.0
        self._predicted = 0.0
        self._predicted_norm = 0.0
        self._verified = 0

    def record(self, meter: Meter, volume: float, skip: str | None) -> None:
        """Add one ended call.

        Args:
            meter: What it moved.
            volume: Padded entries a rank sends, over all passes; between nodes, if there are such.
            skip: Why it travelled uncompressed, or None.
        """
        with self._lock:
            self._total.add(meter)
            self._calls += 1
            if skip is None:
                self._compressed_calls += 1
                self._compressed_bytes += meter.bytes_sent - meter.node_bytes_sent
                self._volume += volume
            else:
                self._skips[skip] += 1

    def record_capture(self, meter: Meter) -> None:
        """Add the bytes and the time of a look at a call, which is no call of its own."""
        with self._lock:
            self._total.add(meter)

    def record_verification(
        self, meter: Meter, error: float, norm: float, predicted: float | None
    ) -> None:
        """Add one verified call: squared error and norm of the exact result, predicted vNMSE.

        A non-finite call has no error; only its bytes count.
        """
        with self._lock:
            self._verification_bytes += meter.bytes_sent
            if math.isfinite(error) and math.isfinite(norm):
                self._error += error
                self._norm += norm
                if predicted is not None:
                    self._predicted += predicted * norm
                    self._predicted_norm += norm
                self._verified += 1

    def metrics(self) -> Metrics:
        """Return the totals as they are now."""
        with self._lock:
            vnmse = (self._error / self._norm if self._norm else 0.0) if self._verified else None
            return Metrics(
                self._calls,
                self._compressed_calls,
                self._total.bytes_sent,
                self._total.bytes_received,
                self._verification_bytes,
                8 * self._compressed_bytes / self._volume if self._volume else 0.0,
                dict(self._skips),
                self._total.codec_s,
                self._total.wire_s,
                vnmse,
                self._predicted / self._predicted_norm if self._predicted_norm else None,
                self._verified,
                self._total.node_bytes_sent,
            )
