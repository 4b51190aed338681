"""What users of other trainers type: the megarl key to use, or why there is none.

Keys of verl that mean the same here are keys of the schema; these are the others, and slime's flags. A key that stands
here is refused like any unknown one, with this advice in place of a guess at its spelling.
"""

import re
from collections.abc import Mapping

# Values that keys of the schema refuse (`option(refused=...)`).
_MEGATRON = (
    "megarl trains with Megatron-core: leave the key out; the section megatron beside it says how devices share the model "
    "(tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, ...)"
)
NO_OTHER_STRATEGY: Mapping[str, str] = dict.fromkeys(
    ("fsdp", "fsdp2", "ddp", "deepspeed", "veomni", "torchtitan", "mindspeed"), _MEGATRON
)
_SGLANG = "megarl generates with SGLang: write sglang, or leave the key out"
NO_OTHER_ENGINE: Mapping[str, str] = dict.fromkeys(("vllm", "hf", "trtllm", "naive"), _SGLANG)
NO_PADDING = (
    "megarl packs sequences and pads nothing anywhere, so there is nothing to switch off; leave it out"
)
NO_HYBRID_ENGINE = (
    "megarl has one way to its rollout engines, the hybrid engine; to have them on devices of their own, set "
    "resource_pools and actor_rollout_ref.rollout.resource_pool (with trainer.mode one_step_off or fully_async they generate while models learn)"
)

# Pairs of keys that say the same thing: only one of each may be given.
SAME_THING: tuple[tuple[str, str], ...] = (
    ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    ("actor_rollout_ref.actor.clip_range", "actor_rollout_ref.actor.clip_ratio"),
    ("actor_rollout_ref.actor.clip_range", "actor_rollout_ref.actor.clip_ratio_low"),
    ("actor_rollout_ref.actor.clip_range", "actor_rollout_ref.actor.clip_ratio_high"),
)

_ROLE = r"(actor_rollout_ref\.(?:actor|ref)|critic|reward_model)(?:\.model)?"
_TRAINED = r"(actor_rollout_ref\.actor|critic)"
_MODEL = r"(?:actor_rollout_ref|critic|reward_model)\.model"
_ROLLOUT = r"actor_rollout_ref\.rollout"
_SIZES = "the layout is {0}.megatron.tensor_model_parallel_size, pipeline_model_parallel_size and context_parallel_size"
_ADAPTERS = r"(?:lora_)?(rank|alpha|dropout|target_modules|exclude_modules|adapter_path)"
_NO_LORA_KEY = "the keys of LoRA are those of {0}.lora"
_NOT_TRAINED = "the reward model is not trained, so it has no adapters: name a folder with merged weights"
_PROFILER = "use trainer.profile_steps and trainer.profile_ranks; timeline.json in the run folder tells who does what when in any case"
_CONTENTS = "checkpoints always hold all that a run goes on with; trainer.save_hf adds the policy as a Hugging Face model"
_GPU_KERNELS = (
    "the kernels follow from the machine (Megatron-core with Transformer Engine on GPUs); leave it out"
)
_GLOBAL_SIZE = "a size over all devices would depend on their number: use {0}.{1}_per_gpu"
_NO_IMAGES = "prompts are text; there are no images or videos"

# (pattern of the whole key, advice); the first that fits counts. `{0}`, `{1}`: what its groups matched.
_KEYS: tuple[tuple[str, str], ...] = (
    (r".*\b_target_", "it names a class of verl's; leave it out"),
    # FSDP and its kin
    (
        _ROLE + r"\.fsdp_config\.(param_offload|grad_offload|optimizer_offload)",
        "FSDP's; use {0}.megatron.{1}",
    ),
    (_ROLE + r"\.fsdp_config\.offload_policy", "FSDP's; use {0}.megatron.param_offload and its siblings"),
    (_ROLE + r"\.fsdp_config\.(?:model_dtype|dtype)", "FSDP's; use {0}.megatron.dtype"),
    (_ROLE + r"\.fsdp_config\.seed", "FSDP's; use {0}.megatron.seed"),
    (_ROLE + r"\.fsdp_config\..*", "FSDP's; megarl shards by Megatron-core: " + _SIZES),
    (_ROLE + r"\.fsdp_config", "FSDP's; megarl shards by Megatron-core: " + _SIZES),
    (
        _ROLE + r"\.ulysses_sequence_parallel_size",
        "use {0}.megatron.context_parallel_size, the devices that share each sequence",
    ),
    (_ROLE + r"\.(?:param_offload|grad_offload|optimizer_offload)", "use the key of this name in {0}.megatron"),
    (_ROLE + r"\.(?:use_torch_compile|use_fused_kernels|entropy_(?:from|check).*)", _GPU_KERNELS),
    (r"(?:actor_rollout_ref\.(?:actor|ref))\.use_remove_padding", NO_PADDING),
    (r"actor_rollout_ref\.(?:actor|ref)\.use_prefix_grouper", "use actor_rollout_ref.actor.share_prompts, for all models"),
    (r"reward_model\.forward_max_token_len_per_gpu", "use reward_model.max_token_len_per_gpu"),
    (_ROLE + r"\.(?:forward_max_token_len_per_gpu)", "use {0}.ppo_max_token_len_per_gpu, for both passes"),
    (_ROLE + r"\.(?:forward_micro_batch_size_per_gpu)", "use {0}.ppo_micro_batch_size_per_gpu, for both passes"),
    (_ROLE + r"\.forward_micro_batch_size", "use {0}.ppo_micro_batch_size_per_gpu, for both passes"),
    (
        r"(actor_rollout_ref\.actor|critic|actor_rollout_ref\.ref)\.(ppo_micro_batch_size|log_prob_micro_batch_size)",
        _GLOBAL_SIZE,
    ),
    (r"(reward_model)\.(micro_batch_size)", _GLOBAL_SIZE),
    (_ROLE + r"\.rollout_n", "follows from actor_rollout_ref.rollout.n; leave it out"),
    (_ROLE + r"\.checkpoint\..*|" + _ROLE + r"\.checkpoint", _CONTENTS),
    (r".*\bprofiler(?:\..*)?", _PROFILER),
    # optimizer
    (_TRAINED + r"\.optim\.lr_warmup_steps_ratio", "use {0}.optim.lr_warmup_steps, in optimizer steps"),
    (_TRAINED + r"\.optim\.total_training_steps", "use {0}.optim.lr_decay_steps; null: the whole run"),
    (
        _TRAINED + r"\.optim\.(?:warmup_style|lr_scheduler_type)",
        "use {0}.optim.lr_decay_style: constant, linear or cosine",
    ),
    (_TRAINED + r"\.optim\.min_lr_ratio", "use {0}.optim.min_lr, a learning rate"),
    (_TRAINED + r"\.optim\.num_cycles", "the cosine falls once, to {0}.optim.min_lr"),
    (_TRAINED + r"\.optim\.override_optimizer_config\.optimizer_cpu_offload", "use {0}.optim.optimizer_cpu_offload"),
    (
        _TRAINED + r"\.optim\.(?:optimizer|optimizer_impl|override_optimizer_config)(?:\..*)?",
        "the optimizer is AdamW; its settings are the keys of {0}.optim",
    ),
    (_TRAINED + r"\.optim\.(?:lr_warmup_init|lr_wsd_.*|weight_decay_incr_style)", "use the keys of {0}.optim"),
    (
        _TRAINED + r"\.optim\.use_checkpoint_opt_param_scheduler",
        "a resumed run has the configuration's schedule, at the checkpoint's step; leave it out",
    ),
    # Megatron
    (
        _ROLE + r"\.megatron\.override_transformer_config\.recompute_granularity",
        "use {0}.megatron.recompute_granularity",
    ),
    (
        _ROLE + r"\.megatron\.override_(?:transformer|ddp|mcore_model)_config(?:\..*)?",
        "Megatron's settings follow from the model's config.json and the keys of {0}.megatron",
    ),
    (
        _ROLE + r"\.megatron\.(?:use_mbridge|vanilla_mbridge|use_megatron_fsdp)",
        "Hugging Face weights are always read and written directly, each rank its slices; leave it out",
    ),
    (
        _ROLE + r"\.megatron\.(?:use_dist_checkpointing|dist_checkpointing_.*)",
        "convert the checkpoint by `megarl convert` and name the folder in actor_rollout_ref.model.path",
    ),
    (_ROLE + r"\.megatron\.forward_only", "follows from the role; leave it out"),
    (_ROLE + r"\.load_weight", "weights are always loaded; leave it out"),
    (_ROLE + r"\.data_loader_seed", "use data.seed"),
    (_ROLE + r"\.nccl_timeout", "use trainer.collective_timeout, in seconds"),
    (_ROLE + r"\.freeze_vision_tower", _NO_IMAGES),
    # models
    (r"reward_model\.(?:.*\.)?(?:lora|peft|target_|exclude_modules).*", _NOT_TRAINED),
    (r"((?:(?:actor_rollout_ref|critic)\.)?model)\.(?!lora\.)" + _ADAPTERS, "use {0}.lora.{1}"),
    (r"(?:lora\.|lora_)(rank|alpha|dropout)|(target_modules|exclude_modules)", "use actor_rollout_ref.model.lora.{0}"),
    (r"(?:.*\.)?model\.lora\.type", "adapters are LoRA's, with use_dora=true DoRA's; leave it out"),
    (r"(?:.*\.)?model\.lora\.merge", "use actor_rollout_ref.rollout.lora_sync: merged or adapters"),
    (
        r"(.*\bmodel)\.(?:lora_.*|target_parameters|peft_.*|lora\.(?:lora_.*|dropout_position|a2a_experimental|dtype|freeze_.*))",
        _NO_LORA_KEY,
    ),
    (_MODEL + r"\.enable_activation_offload", "set enable_gradient_checkpointing beside it instead"),
    (_MODEL + r"\.(?:use_liger|use_fused_kernels|fused_kernel_options.*)", _GPU_KERNELS),
    (_MODEL + r"\.(?:override_config|external_lib)(?:\..*)?", "a model is what its config.json says; edit that"),
    (
        _MODEL + r"\.custom_chat_template",
        "put the template into the tokenizer's folder (chat_template.jinja) and name it in "
        "actor_rollout_ref.model.tokenizer_path",
    ),
    (r"(?:.*\.)?use_shm", "weights are read in place, each rank its own slices; leave it out"),
    (r"actor_rollout_ref\.nccl_timeout", "use trainer.collective_timeout, in seconds"),
    (
        r"critic\.model\.(?:tokenizer_path|trust_remote_code)",
        "values are of the actor's tokens: use the key of this name in actor_rollout_ref.model",
    ),
    (r"actor_rollout_ref\.ref\.model(?:\..*)?", "the reference is the model at actor_rollout_ref.model.path"),
    (r"critic\.enable", "a critic is there where algorithm.adv_estimator=gae asks for one; critic=null: none"),
    (r"critic\.shuffle", "use actor_rollout_ref.actor.shuffle, for both"),
    (r"critic\.loss_agg_mode", "use actor_rollout_ref.actor.loss_agg_mode, for both"),
    (r"critic\.kl_ctrl.*", "use algorithm.kl_ctrl"),
    # rollouts
    (
        _ROLLOUT + r"\.load_format",
        "leave it out: engines begin without weights and get the actor's, verified, before every rollout; evaluation "
        "loads the model's folder",
    ),
    (
        _ROLLOUT + r"\.log_prob_(?:use_dynamic_bsz|max_token_len_per_gpu|micro_batch_size(?:_per_gpu)?)",
        "old log-probs are computed in the very micro-batches of the update, so that an on-policy ratio is exactly 1: use "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    (
        _ROLLOUT + r"\.(?:enforce_eager|cudagraph_capture_sizes|enable_chunked_prefill|enable_prefix_caching"
        r"|max_num_batched_tokens|disable_log_stats|ignore_eos|logprobs_mode|scheduling_policy|limit_images|skip_tokenizer_init)",
        "vLLM's; SGLang decides it by itself; leave it out",
    ),
    (
        _ROLLOUT + r"\.max_model_len",
        "follows from data.max_prompt_length + data.max_response_length; leave it out",
    ),
    (_ROLLOUT + r"\.prometheus(?:\..*)?", "metrics go to trainer.logger and the run folder's metrics.jsonl"),
    (
        _ROLLOUT + r"\.(?:use_block_quant_rollout|layer_name_map)(?:\..*)?",
        "use actor_rollout_ref.rollout.quantization and quantization_block_size",
    ),
    (_ROLLOUT + r"\.prompt_length", "use data.max_prompt_length"),
    (_ROLLOUT + r"\.response_length", "use data.max_response_length"),
    (_ROLLOUT + r"\.engine_kwargs(?:\..*)?", "what engines are told are the keys of actor_rollout_ref.rollout"),
    (
        _ROLLOUT + r"\.(?:val_kwargs\.)?do_sample",
        "temperature says it: 0 is greedy (validation: actor_rollout_ref.rollout.val_kwargs.temperature)",
    ),
    (_ROLLOUT + r"\.(?:mode|over_sample_rate)", "a step trains on the rollouts of its own weights; leave it out"),
    (_ROLLOUT + r"\.calculate_log_probs", "the engines' log-probs always come with the trajectories"),
    (_ROLLOUT + r"\.(?:multi_stage_wake_up|layered_summon)", "use actor_rollout_ref.rollout.free_cache_engine"),
    (
        _ROLLOUT + r"\.(?:update_weights_bucket_megabytes|checkpoint_engine\..*)",
        "use actor_rollout_ref.rollout.sync_bucket_mb",
    ),
    (
        _ROLLOUT + r"\.(?:data_parallel_size|dp_size)",
        "use actor_rollout_ref.rollout.num_engines, each of tensor_model_parallel_size devices",
    ),
    (_ROLLOUT + r"\.pipeline_model_parallel_size", "an engine has one stage; use tensor_model_parallel_size"),
    (
        _ROLLOUT + r"\.multi_turn\.(?:tool_config_path|interaction_config_path|format|use_inference_chat_template"
        r"|tokenization_sanity_check_mode|max_parallel_calls|num_repeat_rollouts)",
        "tools are environments: see actor_rollout_ref.rollout.multi_turn",
    ),
    (_ROLLOUT + r"\.(?:agent|trace)(?:\..*)?", "tools are environments: see actor_rollout_ref.rollout.multi_turn"),
    (_ROLLOUT + r"\.(?:skip_rollout|skip_dump_dir|skip\..*)", "rollouts cannot be replayed; they are written to trainer.rollout_data_dir"),
    (_ROLLOUT + r"\.(?:tp_size|tp)", "use actor_rollout_ref.rollout.tensor_model_parallel_size"),
    # data
    (r"data\.(?:image_key|video_key|return_multi_modal_inputs|image_patch_size)", _NO_IMAGES),
    (
        r"data\.(?:return_raw_chat|return_full_prompt|need_tools_kwargs)",
        "reward functions get prompt, response and extra_info of each row anyway; leave it out",
    ),
    (
        r"data\.(?:dataloader_num_workers|filter_overlong_prompts_workers|num_workers)",
        "prompts are read by the controller alone; leave it out",
    ),
    (r"data\.tool_config_path", "tools are environments: see actor_rollout_ref.rollout.multi_turn"),
    (r"data\.validation_shuffle", "the order of validation prompts changes nothing; leave it out"),
    (r"data\.trust_remote_code", "use actor_rollout_ref.model.trust_remote_code"),
    (r"data\.(?:custom_cls|datagen)(?:\..*)?", "rows come from Parquet or JSON lines files; write them there"),
    (r"data\.sampler\.(?:class_path|class_name)", "register a sampler in a file of `plugins` and name it in data.sampler"),
    # rewards
    (
        r"reward_model\.(?:reward_manager|launch_reward_fn_async)|reward\.reward_manager(?:\..*)?",
        "rewards always run beside generation; leave it out",
    ),
    (r"reward\.(custom_reward_function\.\w+|reward_model\.enable)", "use {0}"),
    (r"(?:reward_model\.|reward\.)?sandbox_fusion(?:\..*)?", "code runs in a sandbox of megarl's own; leave it out"),
    (r"reward_model\.use_dynamic_bsz", "give one size of a micro-batch in reward_model"),
    (r"(reward_model)\.model\.(?:external_lib|use_remove_padding)", "leave it out"),
    (
        r"reward_model\.(?:enable_resource_pool|n_gpus_per_node|nnodes)",
        "name devices of its own in resource_pools and reward_model.resource_pool",
    ),
    # algorithm
    (r"algorithm\.(?:use_pf_ppo|pf_ppo)(?:\..*)?", "megarl has no PF-PPO; algorithm.filter_groups drops groups without spread"),
    (r"algorithm\.rollout_is(?:_.*)?", "use the section algorithm.rollout_correction"),
    # trainer
    (r"trainer\.balance_batch", "rows are always balanced over ranks by their tokens; leave it out"),
    (r"trainer\.critic_warmup", "use critic.warmup_steps"),
    (r"trainer\.validation_data_dir", "they are written to trainer.rollout_data_dir, too"),
    (r"trainer\.val_only", "use the command `megarl eval`"),
    (r"trainer\.max_(?:actor|critic)_ckpt_to_keep", "use trainer.max_ckpt_to_keep: a checkpoint holds both"),
    (r"trainer\.del_local_ckpt_after_load", "use trainer.max_ckpt_to_keep; the one that a run goes on from is never deleted first"),
    (r"trainer\.esi_redundant_time", "use trainer.max_run_minutes, which leaves time for the save"),
    (r"trainer\.default_hdfs_dir", "use trainer.checkpoint_url, a folder that fsspec can open, such as hdfs://..."),
    (r"trainer\.ray_wait_register_center_timeout", "use actor_rollout_ref.rollout.start_timeout, in seconds"),
    (r"trainer\.(?:device|use_legacy_worker_impl)", "follows from the machine; leave it out"),
    (r"ray_(?:kwargs|init)(?:\..*)?", "use trainer.ray_address for a running cluster; null: one is started"),
    (r"global_profiler(?:\..*)?", _PROFILER),
    (r"transfer_queue(?:\..*)?", "trajectories travel through Ray's object store; leave it out"),
    (r"use_vllm", _SGLANG),
    (r"hydra(?:\..*)?", "megarl is not started by Hydra; the run folder is trainer.default_local_dir"),
    # verl's supervised fine-tuning
    (r"model\.partial_pretrain", "use model.path"),
    (r"data\.micro_batch_size(?:_per_gpu)?", "use max_token_len_per_gpu, the tokens of a micro-batch"),
    (r"model\.fsdp_config(?:\..*)?|ulysses_sequence_parallel_size", "use the section megatron"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), advice) for pattern, advice in _KEYS)


# slime's flags, without the two dashes.
FLAGS: Mapping[str, str] = {
    "actor-num-nodes": "trainer.nnodes=N",
    "actor-num-gpus-per-node": "trainer.n_gpus_per_node=N",
    "num-gpus-per-node": "trainer.n_gpus_per_node=N",
    "rollout-num-gpus": "resource_pools={train: {n_gpus_per_node: N}, rollout: {n_gpus_per_node: M}} and "
    "actor_rollout_ref.rollout.resource_pool=rollout",
    "rollout-num-gpus-per-engine": "actor_rollout_ref.rollout.tensor_model_parallel_size=N",
    "colocate": "nothing: actor and engines share all devices unless resource_pools says otherwise",
    "offload": "nothing: where engines share GPUs with models, each leaves while it is not used",
    "offload-train": "actor_rollout_ref.actor.megatron.param_offload=true",
    "offload-rollout": "actor_rollout_ref.rollout.free_cache_engine=true",
    "hf-checkpoint": "actor_rollout_ref.model.path=FOLDER",
    "lora-rank": "actor_rollout_ref.model.lora.rank=N",
    "lora-alpha": "actor_rollout_ref.model.lora.alpha=X",
    "lora-dropout": "nothing: the policy that is trained must be the one that generates",
    "lora-adapter-path": "actor_rollout_ref.model.lora.adapter_path=FOLDER",
    "target-modules": "actor_rollout_ref.model.lora.target_modules=[NAME, ...]",
    "exclude-modules": "actor_rollout_ref.model.lora.exclude_modules=[NAME, ...]",
    "ref-load": "actor_rollout_ref.model.path=FOLDER, which is the reference as well",
    "load": "actor_rollout_ref.model.path=FOLDER (`megarl convert` makes one of a Megatron checkpoint)",
    "save": "trainer.default_local_dir=FOLDER",
    "save-interval": "trainer.save_freq=N",
    "prompt-data": "data.train_files=FILE",
    "input-key": "data.prompt_key=NAME",
    "label-key": "data.answer_key=NAME",
    "tool-key": "data.tools_key=NAME",
    "apply-chat-template": "nothing: chat messages always go through the tokenizer's template",
    "apply-chat-template-kwargs": "data.apply_chat_template_kwargs={...}",
    "rollout-shuffle": "data.shuffle=true",
    "rollout-seed": "actor_rollout_ref.rollout.seed=N",
    "seed": "trainer.seed=N",
    "num-rollout": "trainer.total_training_steps=N",
    "num-epoch": "trainer.total_epochs=N",
    "rollout-batch-size": "data.train_batch_size=N, prompts a step",
    "n-samples-per-prompt": "actor_rollout_ref.rollout.n=N",
    "global-batch-size": "actor_rollout_ref.actor.ppo_mini_batch_size=N, in prompts: slime counts trajectories",
    "num-steps-per-rollout": "actor_rollout_ref.actor.ppo_mini_batch_size=N: train_batch_size over these steps",
    "micro-batch-size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=N",
    "use-dynamic-batch-size": "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "max-tokens-per-gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=N",
    "log-probs-chunk-size": "actor_rollout_ref.actor.megatron.log_prob_chunk_tokens=N",
    "balance-data": "nothing: rows are always balanced over ranks by their tokens",
    "over-sampling-batch-size": "data.gen_batch_size=N with algorithm.filter_groups.enable=true",
    "dynamic-sampling-filter-path": "algorithm.filter_groups.enable=true",
    "rollout-max-prompt-len": "data.max_prompt_length=N",
    "rollout-max-response-len": "data.max_response_length=N",
    "rollout-temperature": "actor_rollout_ref.rollout.temperature=X",
    "rollout-top-p": "nothing: training samples from all tokens",
    "rollout-top-k": "nothing: training samples from all tokens",
    "eval-prompt-data": "data.val_files=FILE",
    "eval-interval": "trainer.test_freq=N",
    "n-samples-per-eval-prompt": "actor_rollout_ref.rollout.val_kwargs.n=N",
    "eval-temperature": "actor_rollout_ref.rollout.val_kwargs.temperature=X",
    "eval-top-p": "actor_rollout_ref.rollout.val_kwargs.top_p=X",
    "rm-type": "reward.rule=NAME",
    "custom-rm-path": "custom_reward_function.path=FILE and custom_reward_function.name=FUNCTION",
    "advantage-estimator": "algorithm.adv_estimator=NAME",
    "gamma": "algorithm.gamma=X",
    "lambd": "algorithm.lam=X",
    "normalize-advantages": "algorithm.whiten_advantages=true",
    "disable-grpo-std-normalization": "algorithm.norm_adv_by_std_in_grpo=false",
    "kl-coef": "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=X",
    "use-kl-loss": "actor_rollout_ref.actor.use_kl_loss=true",
    "kl-loss-coef": "actor_rollout_ref.actor.kl_loss_coef=X",
    "kl-loss-type": "actor_rollout_ref.actor.kl_loss_type=NAME",
    "entropy-coef": "actor_rollout_ref.actor.entropy_coeff=X",
    "eps-clip": "actor_rollout_ref.actor.clip_ratio_low=X",
    "eps-clip-high": "actor_rollout_ref.actor.clip_ratio_high=X",
    "eps-clip-c": "actor_rollout_ref.actor.clip_ratio_c=X",
    "value-clip": "critic.cliprange_value=X",
    "num-critic-only-steps": "critic.warmup_steps=N",
    "critic-lr": "critic.optim.lr=X",
    "use-tis": "algorithm.rollout_correction.rollout_is=token",
    "tis-clip": "algorithm.rollout_correction.rollout_is_threshold=X",
    "lr": "actor_rollout_ref.actor.optim.lr=X",
    "min-lr": "actor_rollout_ref.actor.optim.min_lr=X",
    "lr-decay-style": "actor_rollout_ref.actor.optim.lr_decay_style=NAME",
    "lr-decay-iters": "actor_rollout_ref.actor.optim.lr_decay_steps=N",
    "lr-warmup-iters": "actor_rollout_ref.actor.optim.lr_warmup_steps=N",
    "weight-decay": "actor_rollout_ref.actor.optim.weight_decay=X",
    "adam-beta1": "actor_rollout_ref.actor.optim.betas=[X, Y]",
    "adam-beta2": "actor_rollout_ref.actor.optim.betas=[X, Y]",
    "optimizer-cpu-offload": "actor_rollout_ref.actor.optim.optimizer_cpu_offload=true",
    "clip-grad": "actor_rollout_ref.actor.optim.clip_grad=X",
    "tensor-model-parallel-size": "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=N",
    "pipeline-model-parallel-size": "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=N",
    "context-parallel-size": "actor_rollout_ref.actor.megatron.context_parallel_size=N",
    "expert-model-parallel-size": "actor_rollout_ref.actor.megatron.expert_model_parallel_size=N",
    "expert-tensor-parallel-size": "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=N",
    "decoder-first-pipeline-num-layers": "actor_rollout_ref.actor.megatron.num_layers_in_first_pipeline_stage=N",
    "decoder-last-pipeline-num-layers": "actor_rollout_ref.actor.megatron.num_layers_in_last_pipeline_stage=N",
    "sequence-parallel": "nothing: on where the tensor parallel size is over 1",
    "recompute-granularity": "actor_rollout_ref.actor.megatron.recompute_granularity=full",
    "update-weight-buffer-size": "actor_rollout_ref.rollout.sync_bucket_mb=N, in MiB",
    "sglang-mem-fraction-static": "actor_rollout_ref.rollout.gpu_memory_utilization=X",
    "sglang-max-running-requests": "actor_rollout_ref.rollout.max_num_seqs=N",
    "use-wandb": "trainer.logger=[console, wandb]",
    "wandb-project": "trainer.project_name=NAME",
    "wandb-group": "trainer.experiment_name=NAME",
    "use-tensorboard": "trainer.logger=[console, tensorboard]",
}  # fmt: skip


# Commands of other trainers.
_EXPORT = (
    "`megarl train` exports the policy as a Hugging Face folder, <run folder>/hf, and with trainer.save_hf into each checkpoint; "
    "`megarl convert` turns a Megatron checkpoint into such a folder"
)
COMMANDS: Mapping[str, str] = {
    "merge": _EXPORT,
    "model_merger": _EXPORT,
    "main_ppo": "use megarl train",
    "ppo": "use megarl train",
    "grpo": "use megarl train with algorithm.adv_estimator=grpo",
    "main_generation": "use megarl eval",
    "main_eval": "use megarl eval",
    "fsdp_sft_trainer": "use megarl sft",
    "preprocess": "use `python -m megarl.data.gsm8k`, or Parquet files of any columns, as data.prompt_key and data.answer_key say",
}


def key_advice(key: str) -> str | None:
    """What to do instead of setting the unknown `key`; None: nothing is known of it."""
    for pattern, advice in _COMPILED:
        found = pattern.fullmatch(key)
        if found is not None:
            return advice.format(*(group for group in found.groups() if group is not None))
    return None


def flag_advice(flag: str) -> str | None:
    """What to write instead of a flag such as `--rollout-batch-size`; None: nothing is known of it."""
    name = flag.lstrip("-").partition("=")[0].replace("_", "-")
    advice = FLAGS.get(name)
    if advice is None:
        return None
    return f"--{name} is slime's; megarl has keys: write {advice}"
