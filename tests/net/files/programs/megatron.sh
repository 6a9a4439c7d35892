#!/usr/bin/env bash
# --tensor-model-parallel-size 8 stands in a comment
TP=2
GPT_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --micro-batch-size 2
    --global-batch-size 32
    --fp16
)
MODEL_ARGS="--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py ${GPT_ARGS[@]} $MODEL_ARGS \
    --sequence-parallel --recompute-activations --use-distributed-optimizer
