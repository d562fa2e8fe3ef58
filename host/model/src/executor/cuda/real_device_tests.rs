//! Runs the tests of emulated devices on a real one, where there is one.

use super::*;

/// `SKEP_REQUIRE_GPU=1` makes the absence of a device a failure.
#[test]
fn the_tests_of_devices_pass_on_a_real_device() {
    if let Err(reason) = gpu::probe() {
        assert!(std::env::var_os("SKEP_REQUIRE_GPU").is_none_or(|value| value != "1"), "{reason}");
        eprintln!("checked on the CPU only: {reason}");
        return;
    }
    ON_A_DEVICE.set(true);
    every_architecture_and_chunking_gives_the_exact_logits_up_to_rounding();
    beside_processor::weights_of_every_format_give_the_logits_of_the_cpu();
    beside_processor::stages_apply_the_windows_of_their_layers();
    beside_processor::a_vocabulary_that_no_ranks_share_evenly_gives_the_logits_of_the_cpu();
    quantized::quantized_weights_give_the_logits_of_the_cpu();
    launching::ranks_are_launched_at_once_with_the_results_of_one_thread();
    preparation::every_shape_is_prepared_before_the_first_request();
    ranks_that_share_layers_and_stages_give_the_same_logits();
    a_sequence_gets_the_same_logits_in_any_batch();
    tokens_are_drawn_as_on_the_cpu();
    greedy_tokens_match_the_cpu();
    a_step_started_before_its_tokens_are_known_equals_the_next_step();
    a_row_without_a_token_keeps_the_other_rows_after_the_next_step_has_started();
    a_stalled_rank_fails_the_step_and_the_next_step_succeeds();
    rejects_batches_that_do_not_fit_and_stays_usable();
    deterministic::logits_have_the_same_bits_whatever_shares_the_step_and_however_it_is_split();
    deterministic::replicas_stages_and_reloads_give_the_same_bits();
    deterministic::logits_are_correct_in_a_fixed_order();
    sums_of_ranks::sums_with_their_norm_give_the_bits_of_separate_kernels();
    fp8::logits_with_fp8_stay_close_to_the_exact_ones();
    shared_prefix::a_common_prefix_gives_the_same_tokens_read_once_or_for_each_sequence();
    page_copies::tests::a_sequence_continues_from_imported_pages_with_the_same_tokens();
    page_copies::tests::pages_move_beside_a_step_that_was_started_ahead();
}
