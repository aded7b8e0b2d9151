"""Section ``models``: where a model's folder is."""

from pydantic import field_validator

from penstock.config.section import Section

#: Types that torch and SGLang both accept.
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")


class ModelConfig(Section):
    #: Name of the weights stream.
    name: str = "policy"
    #: Hugging Face folder of the first policy: config, tokenizer, weights.
    path: str
    #: Type of the engines' weights: auto (that of the folder), bfloat16, float16 or float32. The reference trainer
    #: publishes in this type (auto: float32) and trains float32 weights (``trainer.dtype``).
    dtype: str = "auto"

    @field_validator("dtype")
    @classmethod
    def _dtype_is_known(cls, dtype: str) -> str:
        if dtype not in _DTYPES:
            raise ValueError(f"{dtype!r} is not a dtype of weights: write {', '.join(_DTYPES)}")
        return dtype
