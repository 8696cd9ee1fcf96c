"""TorchTitan's tokenizers, datasets and data loaders."""

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer, build_hf_tokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
