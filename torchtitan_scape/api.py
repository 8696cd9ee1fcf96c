"""The public names of the package. `torchtitan_scape` imports this module when one of them is first used."""

from torchtitan_scape.checkpoint.own_loop import checkpoint_states as checkpoint_states
from torchtitan_scape.checkpoint.own_loop import load_checkpoint as load_checkpoint
from torchtitan_scape.methods.demo.options import DemoOptions as DemoOptions
from torchtitan_scape.methods.local_options import Co2Options as Co2Options
from torchtitan_scape.methods.local_options import DilocoOptions as DilocoOptions
from torchtitan_scape.methods.local_options import SparselocoOptions as SparselocoOptions
from torchtitan_scape.methods.local_options import StreamingDilocoOptions as StreamingDilocoOptions
from torchtitan_scape.methods.noloco.options import NolocoOptions as NolocoOptions
from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions as OnebitAdamOptions
from torchtitan_scape.methods.options import DenseOptions as DenseOptions
from torchtitan_scape.methods.powersgd.options import PowersgdOptions as PowersgdOptions
from torchtitan_scape.methods.quantized.options import QuantizedOptions as QuantizedOptions
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions as QuantizedUpdateOptions
from torchtitan_scape.methods.radius.options import RadiusOptions as RadiusOptions
from torchtitan_scape.methods.scape.options import ScapeOptions as ScapeOptions
from torchtitan_scape.methods.sparta.options import SpartaOptions as SpartaOptions
from torchtitan_scape.methods.tagc.options import TagcOptions as TagcOptions
from torchtitan_scape.methods.topk.options import TopkOptions as TopkOptions
from torchtitan_scape.optimizers.elementwise import AdamS as AdamS
from torchtitan_scape.optimizers.elementwise import SignSGD as SignSGD
from torchtitan_scape.optimizers.muon import Muon as Muon
from torchtitan_scape.replica.guard import NonFiniteGradientError as NonFiniteGradientError
from torchtitan_scape.replica.optimizer import ReplicaOptimizer as ReplicaOptimizer
from torchtitan_scape.replica.replicate import Scape as Scape
from torchtitan_scape.replica.replicate import replicate as replicate
