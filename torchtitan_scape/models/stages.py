"""Division of a model into the stages of a pipeline, by TorchTitan's rule."""

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.titan.pipelining import generate_llm_fqn_per_model_part

_DEGREE = "parallelism.pipeline_parallel_degree"


def stage_modules(config: JobConfig, layers: int) -> list[list[str]]:
    """Return the names of the modules of every stage, in their order. Raises ValueError if they do not fit."""
    parallelism, stages = config.parallelism, config.parallelism.pipeline_parallel_degree
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    each, given = parallelism.pipeline_parallel_layers_per_stage, parallelism.module_fqns_per_model_part
    if each is not None and (each < 1 or -(-(layers + first + last) // each) != stages):
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage = {each} does not divide {layers} layers into {stages} "
            f"stages, one per rank; omit it, or change {_DEGREE}"
        )
    if given is None:
        try:
            return generate_llm_fqn_per_model_part(stages, layers, first, last)
        except ValueError as error:
            raise ValueError(
                f"{_DEGREE} = {stages} with {layers} layers, of which the embedding counts as {first} and the output "
                f"as {last}: {error}"
            ) from None
    expected = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]
    if len(given) != stages or not all(given) or [name for names in given for name in names] != expected:
        raise ValueError(
            f"parallelism.module_fqns_per_model_part has {len(given)} lists; it must have {stages} ({_DEGREE}), none "
            f"empty, which contain all modules once, in the order of the model: {', '.join(expected[:2])}, ..., "
            f"{', '.join(expected[-3:])}"
        )
    return given


def micro_batches(config: JobConfig) -> int:
    """Return the number of micro-batches into which a schedule divides a local batch."""
    return config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
