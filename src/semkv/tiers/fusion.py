"""The fusion tier (L1.5): encoder outputs reused whenever the same media item comes again, KV hit or not.

Under vLLM the encoder-cache connector does all of this (`semkv.connectors`). For another engine or a model of your
own, implement `FusionProvider`; a sketch:

    state = store.load(key)
    if state is not None and provider.inject(request, state):
        ...                                  # the encoder is skipped
    else:
        ...                                  # run the model
        store.save(provider.capture(request))

where ``key`` names the media item *and* everything else that shapes the encoder's output: the model's weights, dtype
and processor settings, and the tenant.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from semkv.stores.fusion import FusionState, FusionStore

__all__ = ["FusionProvider", "FusionState", "FusionStore"]

RequestT = TypeVar("RequestT", contravariant=True)


@runtime_checkable
class FusionProvider(Protocol[RequestT]):
    """How an engine hands out its encoder outputs and takes them back.

    ``RequestT`` is whatever the engine calls a request; it must carry one media item.
    """

    def capture(self, request: RequestT) -> FusionState | None:
        """The encoder's output for the request's media item, after the encoder ran; None when there is none.

        The state's key must cover everything that shaped it; the data must be a copy on the host.
        """
        ...

    def inject(self, request: RequestT, state: FusionState) -> bool:
        """Use ``state`` in place of running the encoder for ``request``.

        Returns False, leaving the request untouched, when the state does not fit it: another key, shape or dtype.
        """
        ...
