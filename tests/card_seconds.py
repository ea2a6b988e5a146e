"""Which tests of a card take long, so that they begin first: what begins last keeps the others waiting.

Seconds on an H100 whose host has 16 slow cores, eight processes side by side (2026-11-27): nearly all of it compiling.
"""

from __future__ import annotations

SECONDS = {
    "test_kernels_match_float64_on_the_gpu[experts_packed": 90,
    "test_kernels_match_float64_on_the_gpu[gated_sums_cases:f": 30,
    "test_kernels_match_float64_on_the_gpu[linear_logp_cases:bfloat16": 40,
    "test_on_a_card_two_runs_with_one_seed_have_one_curve": 40,
    "test_on_a_card_the_weights_stay_in_fp8_and_the_gradients_are_the_twins[True": 40,
    "test_kernels_match_float64_on_the_gpu[experts_cases:bfloat16": 40,
    "test_kernels_match_float64_on_the_gpu[experts_decoded": 30,
    "test_kernels_reach_elements_2_to_the_31_apart_on_the_gpu": 35,
    "[flex_attention": 30,
    "test_kernels_match_float64_on_the_gpu[experts_crosses": 30,
    "test_compiled_layers_with_frozen_weights_skip_the_weight_gradients_product": 28,
    "test_int8_rounding_is_compiled_with_its_layer": 26,
    "test_the_base_is_computed_in_fp8_in_each_method[dpo": 26,
    "test_the_base_is_computed_in_fp8_in_each_method[sft": 25,
    "test_kernels_match_float64_on_the_gpu[norm_rope_cases": 25,
    "test_kernels_match_float64_on_the_gpu[linear_cross_entropy_cases": 25,
    "test_on_the_gpu_every_combination_has_its_times_and_leaves_no_trace": 25,
    "test_one_launch_unpacks_as_bitsandbytes_does_on_the_gpu": 24,
    "test_features_serve_images_on_a_card_and_memory_falls": 24,
    "test_compiled_": 20,
    "test_kernels_match_float64_on_the_gpu[gated_sums_tiles": 17,
    "test_on_a_card_every_kernel_is_timed_once_and_a_second_run_takes_what_was_kept": 15,
    "test_its_parts_are_timed_and_the_table_tells_them": 14,
    "test_on_the_gpu_a_compiled_layer_stays_one_graph": 13,
    "test_on_a_card_recorded_layers_have_the_numbers_of_layers_that_are_launched": 13,
    "test_on_a_card_curves_of_200_steps_agree_with_and_without_kernels": 12,
    "test_on_a_gpu_a_hundred_samplings_hold_no_more_than_forty": 12,
    "test_layers_stream_in_each_method": 3,
    "test_on_a_card_adapters_learn_alike_and_take_less_memory": 10,
    "test_kernels_match_float64_on_the_gpu": 5,
}
"""By a part of a test's name, the first that is in it."""


def of(name: str) -> float:
    """Seconds that a test of a card takes; 2 for one that is not in the table."""
    return next((seconds for part, seconds in SECONDS.items() if part in name), 2)
