"""ONNX files that onnxruntime runs at any batch and length."""

import pytest
import torch

from rankscope import LinformerConfig, LinformerForMaskedLM


# Exporting takes ten seconds and more a kind: the two that differ most run always.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    ["learned", "dynamic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mean", "max", "convolution"))],
)
def test_onnxruntime_gives_the_models_logits_at_any_batch_length_and_padding(kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = LinformerForMaskedLM(
        LinformerConfig(
            vocab_size=45,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=24,
            projected_length=6,
            projection=kind,
            initializer_range=0.2,
        )
    ).eval()
    ids = torch.randint(5, 45, (3, 20), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids)
    keep[0, :4], keep[1, 15:] = 0, 0
    batch, n = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("n", min=2, max=24)
    axes = {0: batch, 1: n}
    names = ["input_ids", "attention_mask"]
    with torch.no_grad():
        program = torch.onnx.export(
            model,
            (ids, keep),
            dynamo=True,
            dynamic_shapes=dict.fromkeys(names, axes),
            input_names=names,
            output_names=["logits"],
            verbose=False,
        )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for rows, length in ((3, 20), (1, 7), (2, 24)):
        some = torch.randint(5, 45, (rows, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(some)
        mask[0, : length // 3] = 0
        found = session.run(None, {"input_ids": some.numpy(), "attention_mask": mask.numpy()})[0]
        with torch.no_grad():
            wanted = model(some, mask).logits
        torch.testing.assert_close(torch.from_numpy(found)[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-4)
