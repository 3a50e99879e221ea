"""Published sizes to the digit; a design survives JSON."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from hypothesis import given, settings

import keepleft as kl
from keepleft.models import presets
from keepleft.models.design import _OLD_NAMES, from_json, to_json
from peers import ENCODER_DECODERS, save
from strategies import designs

PUBLISHED = {  # weights of the public checkpoints that these presets stand for
    "gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gpt_neo": 1_315_575_808,
    "llama": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_33b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1": 8_030_261_248,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "smollm2_135m": 134_515_008,
    "mistral": 7_241_732_096,
    "qwen2_0_5b": 494_032_768,
    "t5": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_v1_1": 76_961_152,
    "t5_v1_1_base": 247_577_856,
    "t5_v1_1_large": 783_150_080,
    "t5_v1_1_xl": 2_849_757_184,
    "t5_v1_1_xxl": 11_135_332_352,
    "mt5": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "mt5_xl": 3_742_619_648,
    "mt5_xxl": 12_921_057_280,
    "bart": 139_420_416,
    "bart_large": 406_291_456,
    "bert": 109_482_240,
    "bert_large": 335_141_888,
    "bert_masked": 109_514_298,
    "pegasus": 570_797_056 - 2 * 1024 * 1024,  # as transformers counts pegasus-large
    "marian": 74_410_496 - 2 * 512 * 512,  # published files count the sinusoids, which are a formula
}
ROUNDED = {  # papers that give no more than this: name → weights, and how far the last printed digit reaches
    "gpt3_small": (125e6, 1e6),
    "gpt3_medium": (350e6, 10e6),
    "gpt3_large": (760e6, 5e6),
    "gpt3_xl": (1.3e9, 0.05e9),
    "gpt3_2_7b": (2.7e9, 0.05e9),
    "gpt3_6_7b": (6.7e9, 0.05e9),
    "gpt3_13b": (13.0e9, 0.1e9),
    "gpt3": (175.0e9, 0.5e9),
    "vaswani": (65e6, 2e6),
    "vaswani_big": (213e6, 2e6),  # with "about 37000 tokens"
}
TABLE_2_1 = {  # of Brown et al. 2020: layers, width, width of a head
    "gpt3_small": (12, 768, 64),
    "gpt3_medium": (24, 1024, 64),
    "gpt3_large": (24, 1536, 96),
    "gpt3_xl": (24, 2048, 128),
    "gpt3_2_7b": (32, 2560, 80),
    "gpt3_6_7b": (32, 4096, 128),
    "gpt3_13b": (40, 5140, 128),
    "gpt3": (96, 12288, 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_size(name):
    assert kl.count_parameters(presets.ALL[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_preset_has_the_size_its_paper_rounds_to(name):
    size, slack = ROUNDED[name]
    assert abs(kl.count_parameters(presets.ALL[name]) - size) <= slack


@pytest.mark.parametrize("name", TABLE_2_1)
def test_gpt3_has_the_rows_of_its_paper_and_alternates_dense_and_banded_layers(name):
    design = presets.ALL[name]
    assert (design.decoder.layers, design.dim, design.head_width) == TABLE_2_1[name]
    assert design.feedforward.width == 4 * design.dim
    assert design.position.length == 2048
    dense, banded = design.decoder.mask
    assert dense == kl.causal
    assert kl.mask_table(banded, 400).sum() < kl.mask_table(dense, 400).sum()


def test_every_preset_is_checked_against_a_published_size():
    assert set(presets.ALL) == {*PUBLISHED, *ROUNDED}


@pytest.mark.parametrize(
    ("name", "config", "model"),
    [
        ("gpt2", "GPT2Config", "GPT2LMHeadModel"),
        ("gpt", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel"),
        ("llama", "LlamaConfig", "LlamaForCausalLM"),
        ("t5", "T5Config", "T5ForConditionalGeneration"),
        ("bart_large", "BartConfig", "BartForConditionalGeneration"),
        ("bert", "BertConfig", "BertModel"),
        ("gpt_neo", "GPTNeoConfig", "GPTNeoForCausalLM"),
    ],
)
def test_an_outside_implementation_counts_the_same(name, config, model):
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        import transformers

        peer = getattr(transformers, model)(getattr(transformers, config)())
    assert sum(p.numel() for p in peer.parameters()) == kl.count_parameters(presets.ALL[name])


@pytest.mark.parametrize("name", ["bart_unequal", "marian_unequal", "pegasus_unequal"])
def test_an_encoder_unlike_its_decoder_counts_the_same(name, tmp_path):
    peer = ENCODER_DECODERS[name]()
    design = kl.load(save(peer, tmp_path), device="meta")[0].design
    assert (design.encoder.heads, design.encoder.feedforward.width) == (4, 31)
    assert (design.heads, design.feedforward.width) == (3, 44)
    assert sum(p.numel() for p in peer.parameters() if p.requires_grad) == kl.count_parameters(design)


@given(designs())
@settings(max_examples=100)
def test_a_design_survives_json(design):
    assert from_json(json.loads(json.dumps(to_json(design)))) == design


def test_a_stack_written_before_it_had_numbers_of_its_own_is_read():
    old = to_json(presets.bart)
    for side in ("encoder", "decoder"):
        del old[side]["heads"], old[side]["feedforward"]
    assert from_json(old) == presets.bart


@pytest.mark.parametrize("name", presets.ALL)
def test_every_preset_survives_json(name):
    assert from_json(json.loads(json.dumps(to_json(presets.ALL[name])))) == presets.ALL[name]


OLD_NAMES = {  # as files had them before these classes and this field were renamed
    "StackDesign": "Stack",
    "LMHead": "Vocabulary",
    "MaskedLMHead": "Masked",
    "PoolingHead": "Pooled",
    "ClassificationHead": "Classes",
    "NormalInit": "Normal",
    "XavierInit": "Xavier",
    "T5Init": "Folded",
    "LearnedPositions": "Learned",
    "LinearRopeScaling": "Stretched",
    "Llama3RopeScaling": "Llama3",
    "token_types": "kinds",
}
NEWER_FIELDS = {"StackDesign": ("heads", "feedforward")}  # which old files do not have
WITH_OLD_NAMES = presets.ALL | {
    "labels": presets.bert.but(head=kl.ClassificationHead(5)),
    "linear": presets.llama.but(position=kl.Rotary(scaling=kl.LinearRopeScaling(2.0))),
}


def in_old_names(value, used: set[str]):
    """The JSON of a design as it was written before the renames; `used` collects the new names in it."""
    if isinstance(value, list):
        return [in_old_names(item, used) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    used |= OLD_NAMES.keys() & {kind, *value}
    value = {name: item for name, item in value.items() if name not in NEWER_FIELDS.get(kind, ())}
    old = {OLD_NAMES.get(name, name): in_old_names(item, used) for name, item in value.items()}
    return old | ({"kind": OLD_NAMES.get(kind, kind)} if kind else {})


@pytest.mark.parametrize("name", WITH_OLD_NAMES)
def test_a_design_reads_back_from_a_file_with_the_old_names(name):
    design = WITH_OLD_NAMES[name]
    old = in_old_names(json.loads(json.dumps(to_json(design))), set())
    assert not OLD_NAMES.keys() & set(json.dumps(old).replace('"', " ").split())
    assert from_json(old) == design


def test_every_old_name_is_read_somewhere():
    used: set[str] = set()
    for design in WITH_OLD_NAMES.values():
        in_old_names(to_json(design), used)
    assert used == set(OLD_NAMES)
    assert {old: new for new, old in OLD_NAMES.items()} == _OLD_NAMES


def test_what_json_cannot_carry_is_refused_by_name():
    own = kl.Where("my_own", lambda b, h, q, k: k <= q)
    with pytest.raises(ValueError, match="my_own"):
        to_json(presets.gpt2.but(decoder=kl.StackDesign(2, (own,))))
    good = to_json(presets.gpt2)
    with pytest.raises(ValueError, match="unknown fields colour"):
        from_json(good | {"colour": 3})
    with pytest.raises(ValueError, match="kind 'Wobble'"):
        from_json(good | {"norm": {"kind": "Wobble"}})
    with pytest.raises(ValueError, match="vocab"):
        from_json({k: v for k, v in good.items() if k != "vocab"})


@given(designs())
@settings(max_examples=30)
def test_the_same_seed_builds_the_same_weights_and_all_of_them_are_set(design):
    a, b = (kl.build(design, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )
    assert all(p.isfinite().all() for p in a.parameters())
    assert kl.count_parameters(design) == sum(p.numel() for p in a.parameters())


@pytest.mark.parametrize(
    "name", ["vaswani", "gpt", "gpt2", "gpt3_small", "llama", "t5", "mt5", "bart", "marian", "bert_masked"]
)
def test_a_fresh_model_starts_near_a_uniform_guess(name):
    """So that training can begin: neither exploding nor silent."""
    design = presets.small(presets.ALL[name])
    model = kl.build(design, generator=torch.Generator().manual_seed(0)).eval()
    tokens = torch.randint(design.vocab, (4, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        scores = model(tokens, tokens) if isinstance(model, kl.EncoderDecoder) else model(tokens)
    following = torch.randint(design.vocab, (4, 16), generator=torch.Generator().manual_seed(2))
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
    assert loss < 1.6 * torch.tensor(float(design.vocab)).log()
