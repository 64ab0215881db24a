"""Finding optimizers that hide copies of the weights, by how their steps undo what rounds have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.hooks.shards import own_of

SAMPLED = 256
"""Values of each parameter by which an optimizer is judged."""

PUT_BACK, STAYED = 0.3, 0.15
"""A step puts hidden weights back if it undoes at least the first share of a round's change; below the second, not."""

CERTAIN = 0.1
"""The share is only judged when its standard error is at most this."""

EXPLAINED = 0.8
"""Putting back must account for at least this much of such a step, as a correlation."""

ENOUGH = 3
"""Rounds that were put back before an optimizer is refused; they must be one in five of those that were judged, too."""

TRUSTED = 20
"""Rounds that stayed before an optimizer is trusted, and as many more for each that seemed to be put back."""

COLLINEAR = 1e-4
"""A column counts as explained by those before it when less than this share of its square is left."""


class Watch:
    """Looks at each step of some parameters that one optimizer steps and rounds write together.

    A round writes P. An honest step D follows from the gradient and from what training does anyway, whatever P was.
    One that puts hidden weights back has -P in it, or a share of that. So D is regressed on P, beside the gradient, the
    step before, and the progress since P and before P: without these, training that is drawn to where it came from
    would look the same. So would a pull to weights that are in plain sight, in the state; D is regressed on these, too.
    The columns' products are noted in each step, and looked at once a round.

    `name` is the optimizer's; `in_sight` tells what there is of weights in sight, each as tensors for all parameters.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], in_sight: Callable[[], Sequence[Sequence[Tensor]]]
    ) -> None:
        self._name = name
        self._parameters = parameters
        self._in_sight = in_sight
        self._put_back = self._stayed = self._judged = 0
        self.restart()

    def restart(self) -> None:
        """Forgets the last round: the weights were set otherwise than by training."""
        self._products: list[Tensor] = []
        self._look(sample(self._parameters))
        self._gradients = self._step = self._since = self._before = self._written = torch.zeros_like(self._now)
        self._moved = torch.zeros_like(self._now[:1])

    @property
    def trusts(self) -> bool:
        """Whether enough rounds have stayed."""
        return self._stayed >= TRUSTED * (1 + self._put_back)

    def stepped(self) -> None:
        """Records an inner step."""
        now = sample(self._parameters)
        step = now - self._now
        self._gradients = self._gradients + sample([_gradient_of(parameter) for parameter in self._parameters])
        columns = [self._gradients, self._since, self._step, self._before, *self._pulls, self._written, step]
        self._note(torch.stack(columns))
        moves = step.any()  # not always, where an optimizer gathers gradients by itself
        self._moved = self._moved.logical_or(moves).to(now.dtype)
        self._gradients = torch.where(moves, torch.zeros_like(now), self._gradients)
        self._step, self._since = torch.where(moves, step, self._step), self._since + step
        self._look(now)

    def written(self) -> None:
        """A round has written the parameters since the last step. Raises UserError once enough were put back."""
        self._judge()
        now = sample(self._parameters)
        pending = self._written * (1 - self._moved)
        self._written, self._before, self._since = now - self._now + pending, self._since, torch.zeros_like(now)
        self._moved = torch.zeros_like(self._moved)
        self._look(now)

    def _look(self, now: Tensor) -> None:
        self._now = now
        self._pulls = [sample(weights).to(now) - now for weights in self._in_sight()]

    def _note(self, columns: Tensor) -> None:
        if self._products and len(columns) != len(self._products[-1]):
            self._products = []  # other weights have come in sight
        self._products.append(columns @ columns.T)

    def _judge(self) -> None:
        """Looks at the steps since the last round, but for those that moved nothing, or came before any."""
        if not self._products:
            return
        each = torch.stack(self._products).double().cpu()
        self._products = []
        found = [_share(products, self._now.numel()) for products in each if products[-1, -1] and products[-2, -2]]
        self._judged += any(error < CERTAIN for _, error, _ in found)
        if any(share < -PUT_BACK and error < CERTAIN and fit < -EXPLAINED for share, error, fit in found):
            self._put_back += 1
            if self._put_back >= max(ENOUGH, self._judged / 5):
                raise UserError(
                    f"{self._name} keeps weights of its own and puts them back over what rounds have made of the "
                    "model's; use an optimizer that works on the model's parameters, or that keeps its copies in its "
                    "state"
                )
        elif found and all(share > -STAYED and error < CERTAIN for share, error, _ in found):
            self._stayed += 1


def sample(tensors: Sequence[Tensor]) -> Tensor:
    """Some values of each tensor, evenly spaced, as one float32 or float64 tensor."""
    flat = [own_of(tensor.detach()).reshape(-1) for tensor in tensors]
    values = torch.cat([v[:: max(1, v.numel() // SAMPLED)][:SAMPLED].to(flat[0].device) for v in flat])
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return gradient if gradient is not None and gradient.layout == torch.strided else torch.zeros_like(parameter)


def _share(products: Tensor, samples: int) -> tuple[float, float, float]:
    """The last column's slope on the one before it, its standard error, and their correlation, beside all others.

    The error is infinite where the others account for that one, too. The products are those of all columns with each
    other, float64; `samples` is the columns' length.
    """
    left = products.clone()
    for column in range(len(left) - 2):
        if left[column, column] > COLLINEAR * products[column, column]:
            left -= torch.outer(left[:, column], left[column]) / left[column, column]
    written, product, step = left[-2, -2].item(), left[-1, -2].item(), left[-1, -1].item()
    if not written > COLLINEAR * products[-2, -2].item():
        return 0.0, math.inf, 0.0
    share = product / written
    step = max(step, share * product)  # rounding may leave less
    error = math.sqrt((step - share * product) / written / max(samples - len(left), 1))
    return share, error, product / math.sqrt(written * step) if step else 0.0
