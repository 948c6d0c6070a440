"""An adapter's way from the trainer to an engine: within one process, between processes of a host, between hosts."""

from miles_k3.adapters.transport.handover import AdapterReceiver, SyncReport, publish

__all__ = ["AdapterReceiver", "SyncReport", "publish"]
