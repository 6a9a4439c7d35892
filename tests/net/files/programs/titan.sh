torchrun --nproc_per_node 8 --nnodes 2 -m torchtitan.train --module llama3 \
  --parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 \
  --parallelism.data_parallel_shard_degree 4 --training.local_batch_size 4 --training.global_batch_size 64 \
  --parallelism.pipeline_parallel_microbatch_size 1
