#!/usr/bin/env python3
"""Writes adapters with the `peft` package, for the tests to read, or lets `peft` load one that Firebox wrote.

    pip install torch transformers==5.23.0 peft==0.21.2
    python make_peft.py                 # writes fixtures/peft/ and fixtures/peft-rslora/
    python make_peft.py --check DIR     # loads DIR, written for the model below, and prints what it adds

Beside each adapter stands `product.json`: for every module, scale · B · A as peft merges it.
"""
import argparse, json, pathlib, sys
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
HERE = pathlib.Path(__file__).parent / "fixtures"


def base():
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama", vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def products(model):
    """What the adapter adds to each weight: the merged weight less the weight."""
    before = {n: p.detach().clone() for n, p in base().named_parameters()}
    merged = dict(model.merge_and_unload().named_parameters())
    added = {n.removesuffix(".weight"): (merged[n].detach() - before[n]) for n in before}
    return {n: a.tolist() for n, a in added.items() if a.abs().max() > 0}


def write(name, **more):
    out = HERE / name
    model = get_peft_model(base(), LoraConfig(lora_alpha=6, bias="none", task_type="CAUSAL_LM", **more))
    torch.manual_seed(2)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.copy_(torch.randn_like(p))
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    json.dump(products(model), open(out / "product.json", "w"))


parser = argparse.ArgumentParser()
parser.add_argument("--check")
arguments = parser.parse_args()
if arguments.check:
    json.dump(products(PeftModel.from_pretrained(base(), arguments.check)), sys.stdout)
else:
    write("peft", r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 2])
    write("peft-rslora", r=3, target_modules=["model.layers.0.self_attn.v_proj", "model.layers.2.mlp.up_proj"], use_rslora=True)
