"""ArchSpecs by hand, of which only what the adapter's templates read is right, and adapters rendered from them."""

from __future__ import annotations

import types
from typing import Any

from onboard.render.adapter import adapter_context
from onboard.render.environment import environment
from onboard.render.style import format_sources
from onboard.spec import arch

FIXED = arch.Bias(False)
NORM = arch.Norm("layer", True, FIXED, 0.0, "1e-05")


def architecture(
    config_class: str,
    rows: tuple[arch.KeyRow, ...],
    *,
    num_heads: str = "config.num_attention_heads",
    num_key_value_heads: str = "config.num_attention_heads",
    head_dim: str = "config.hidden_size // config.num_attention_heads",
    intermediate_size: str = "config.intermediate_size",
    ignored: tuple[arch.IgnoredKey, ...] = (),
    base_prefix: str | None = None,
) -> arch.ArchSpec:
    """A spec whose sizes and checkpoint are given and whose other parts are a pre-norm decoder's."""
    return arch.ArchSpec(
        architecture="ToyForCausalLM",
        model_type="toy",
        reference_class="ToyForCausalLM",
        config_class=config_class,
        dimensions=arch.Dimensions(8, 2, 4, 4, 2, 16, 32, None),
        embedding=arch.Embedding(False, None, False, False, None, False),
        layer_kinds=("full_attention", "full_attention"),
        has_layer_types=False,
        norm=NORM,
        final_norm=True,
        attention=arch.Attention(
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            q_bias=FIXED,
            k_bias=FIXED,
            v_bias=FIXED,
            o_bias=FIXED,
            qk_norm=None,
            output_norm=None,
            rotary=None,
            rope_layers=None,
            scale="self.head_dim**-0.5",
            softcap=None,
            sinks=False,
            alibi=None,
            window_key=None,
            window_layers=None,
            dropout_key=None,
        ),
        rope=arch.Rope((), (), False, False, None, None, False, {}),
        mlp=arch.Mlp(False, intermediate_size, FIXED, FIXED, "gelu", None, False, None),
        block=arch.Block(False, False, "input_layernorm", None, "post_attention_layernorm", None, None),
        head=arch.Head(False, None, None),
        tying=arch.Tying(False),
        checkpoint=arch.Checkpoint(rows, ignored, base_prefix),
        dropouts=arch.Dropouts(None, None, None, None),
        fixed=(),
        review=(),
        provenance={},
    )


def render(spec: arch.ArchSpec, template: str = "package/state_dict_adapter.py.j2") -> str:
    """A formatted file of the toy's package."""
    names = {"prefix": "Toy", "package": "toy", "header": "", "config_module": "transformers", "code": None}
    context = adapter_context(spec) | names | {"spec": spec}
    text = environment().get_template(template).render(context)
    return format_sources({"file.py": text}, ("nemo_automodel", "toy"))["file.py"]


def load(spec: arch.ArchSpec) -> Any:
    """The rendered adapter as a module."""
    module = types.ModuleType("toy_adapter")
    exec(compile(render(spec), "state_dict_adapter.py", "exec"), module.__dict__)
    return module
