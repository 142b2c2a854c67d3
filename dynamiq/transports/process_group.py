"""What transports over torch.distributed share: joining a group, one post, foreign errors."""

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq.core.errors import InputError, TransportError
from dynamiq.core.transport import Transport
from dynamiq.transports.exchange import Exchange
from dynamiq.transports.lifecycle import Lifecycle
