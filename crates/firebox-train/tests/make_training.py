#!/usr/bin/env python3
"""Writes what PyTorch makes of small trainings, for the tests to compare with.

    pip install torch transformers==5.23.0 safetensors
    python make_training.py

fixtures/toy/            two layers and a norm: initial.safetensors, expected.json
fixtures/llama/          a decoder as Hugging Face has it: config.json, model.safetensors (the initial weights), expected.json

`expected.json` has the settings, under the names of `run.toml`, and after so many steps of torch.optim.AdamW with
clip_grad_norm_ the losses (each before its step), the gradients' norms before clipping and the learning rates. The decoder's
also has the batches: of every batch the sequences, and of every token whether it is a target; under "gradients" a few
numbers of each weight's gradient before the first step, clipped by nothing, and under "final" the same few of each weight
after the last one: of n numbers every (n // 7)th. `expected-head.json` is of the same batches with all frozen but the last
block, the final norm and the unembedding. Weights decay that have two dimensions or more.
"""
import json, math, pathlib
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
torch.set_num_threads(1)
HERE = pathlib.Path(__file__).parent / "fixtures"


def train(model, batches, loss_of, s):
    named = [p for p in model.parameters() if p.requires_grad]
    adam = s["optimizer"]
    optimizer = torch.optim.AdamW(
        [dict(params=[p for p in named if p.dim() >= 2], weight_decay=adam["weight_decay"]),
         dict(params=[p for p in named if p.dim() < 2], weight_decay=0.0)],
        lr=s["schedule"]["peak"], betas=(adam["beta_1"], adam["beta_2"]), eps=adam["epsilon"])
    losses, norms, rates = [], [], []
    for step in range(s["steps"]):
        peak, floor, warm_up = s["schedule"]["peak"], s["schedule"]["floor"], s["schedule"]["warm_up"]
        if step < warm_up:
            rate = peak * (step + 1) / warm_up
        else:
            progress = (step - warm_up) / (s["steps"] - warm_up)
            rate = floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # The mean over the targets of all batches of the step.
        here = [loss_of(model, batch) for batch in batches[step * s["accumulate"]:(step + 1) * s["accumulate"]]]
        count = sum(n for _, n in here)
        loss = sum(total for total, _ in here) / count
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(named, s["clip"]).item())
        optimizer.step()
        losses.append(loss.item())
        rates.append(rate)
    return dict(losses=losses, norms=norms, rates=rates)


def settings(steps, **more):
    s = dict(seed=0, steps=steps, accumulate=1, clip=1.0, schedule=dict(peak=1e-2, warm_up=5, floor=1e-3),
             optimizer=dict(beta_1=0.9, beta_2=0.95, epsilon=1e-8, weight_decay=0.1))
    s.update(more)
    return s


class Toy(torch.nn.Module):
    """As the toy of tests/support: weights are [inputs, outputs]."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(6, 10) * 0.4)
        self.bias = torch.nn.Parameter(torch.zeros(10))
        self.norm = torch.nn.Parameter(torch.ones(10))
        self.second = torch.nn.Parameter(torch.randn(10, 4) * 0.4)

    def forward(self, x):
        h = torch.tanh(x @ self.first + self.bias)
        h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6) * self.norm
        return h @ self.second


def toy():
    torch.manual_seed(5)
    out = HERE / "toy"
    out.mkdir(parents=True, exist_ok=True)
    model, teacher = Toy(), Toy()
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, out / "initial.safetensors")
    s = settings(60, accumulate=2, clip=0.4)
    batches = []
    for number in range(s["steps"] * s["accumulate"]):
        x = torch.randn(3 + number % 4, 6)
        batches.append((x, teacher(x).detach().argmax(-1)))

    def loss_of(model, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

    expected = train(model, batches, loss_of, s)
    rows = lambda t: [[float(f"{v:.9g}") for v in row] for row in t.tolist()]
    json.dump(dict(settings=s, inputs=[rows(x) for x, _ in batches], targets=[y.tolist() for _, y in batches],
                   **expected, final={name: p.flatten().tolist() for name, p in model.named_parameters()}),
              open(out / "expected.json", "w"))


def llama():
    torch.manual_seed(7)
    out = HERE / "llama"
    config = AutoConfig.for_model(
        "llama", vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            # Wider than the default initialisation, so that there are gradients to speak of.
            if p.dim() >= 2:
                p.mul_(4.0)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    s = settings(50, clip=0.7)
    # Copying: random letters, a mark, and the same letters again, which are the targets.
    batches = []
    for _ in range(s["steps"]):
        batch = []
        for length in torch.randint(3, 9, (4,)).tolist():
            letters = torch.randint(4, 20, (length,)).tolist()
            tokens = [1] + letters + [3] + letters + [2]
            batch.append(dict(tokens=tokens, learn=[False] * (length + 2) + [True] * (length + 1)))
        batches.append(batch)

    def loss_of(model, batch):
        total, count = 0.0, 0
        for sequence in batch:
            ids = torch.tensor([sequence["tokens"]])
            learn = torch.tensor(sequence["learn"])[1:]
            logits = model(ids, use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits[learn], ids[0, 1:][learn], reduction="sum")
            count += int(learn.sum())
        return total, count

    for name, trained in [("expected", lambda name: True),
                          # A head of one block, as training with a frozen trunk has it.
                          ("expected-head", lambda name: "layers.2." in name or name in ("model.norm.weight", "lm_head.weight"))]:
        fresh = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
        for parameter, p in fresh.named_parameters():
            p.requires_grad_(trained(parameter))
        # Gradients at the start, against which gradients are checked: a few numbers of each weight.
        total, count = loss_of(fresh, batches[0])
        (total / count).backward()
        some = lambda t: [float(f"{v:.7g}") for v in t.flatten()[:: max(1, t.numel() // 7)].tolist()]
        gradients = {n: some(p.grad) for n, p in fresh.named_parameters() if p.grad is not None}
        expected = train(fresh, batches, loss_of, s)
        final = {n: some(p.detach()) for n, p in fresh.named_parameters() if p.requires_grad}
        more = dict(batches=batches) if name == "expected" else {}
        json.dump(dict(settings=s, **expected, gradients=gradients, final=final, **more),
                  open(out / f"{name}.json", "w"))


toy()
llama()
