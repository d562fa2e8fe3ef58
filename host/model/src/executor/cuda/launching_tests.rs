//! Tests of ranks whose launches are made by a thread each.

use std::sync::Barrier;

use skep_kernels::KernelError;

use super::super::launching::Launchers;
use super::*;

const RANKS: usize = 2;

fn two_ranks(name: &str) -> CudaExecutor {
    load(name, ExecutorOptions { tensor_parallel: RANKS, ..cuda_options() }, "0,1")
}

fn prompt(ids: &[u32], tokens: usize) -> Batch {
    Batch { sequences: vec![sequence(&ids[..tokens], 0, 9, LogitsWanted::All)] }
}

fn logits(executor: &mut CudaExecutor, batch: &Batch) -> Vec<Vec<f32>> {
    executor.forward(batch).unwrap();
    (0..batch.token_count()).map(|row| executor.logits(row).unwrap().to_vec()).collect()
}

#[test]
pub(super) fn ranks_are_launched_at_once_with_the_results_of_one_thread() {
    for name in ["llama-gqa", "qwen2-bias"] {
        let batch = prompt(&expected(name).0, 20);
        let mut in_turn = two_ranks(name);
        in_turn.launchers = Some(Launchers::in_turn(&in_turn.stages));
        let wanted = logits(&mut in_turn, &batch);
        let mut at_once = two_ranks(name);
        let mut launchers = Launchers::start(&at_once.stages).unwrap();
        // On one real device, all ranks are launched by one thread.
        if launchers.count() > 0 {
            assert_eq!(launchers.count(), RANKS - 1);
            // No rank is launched before all are about to be.
            launchers.meeting = Some(Arc::new(Barrier::new(RANKS)));
        }
        at_once.launchers = Some(launchers);
        assert!(logits(&mut at_once, &batch) == wanted, "{name}");
    }
}

#[test]
fn a_rank_whose_device_is_lost_fails_the_step_of_the_whole_group_as_a_fault() {
    let name = "llama-gqa";
    let batch = prompt(&expected(name).0, 20);
    let mut executor = two_ranks(name);
    executor.forward(&batch).unwrap();
    executor.logits(0).unwrap();
    executor.ranks_mut().for_each(|rank| rank.shape.rank_deadline_us = 1000);
    let lost = KernelError::Driver { call: "launch", reason: "the device is lost".to_owned() };
    executor.stages[0][1].device.fail(lost);
    // Launches are accepted, as by a driver, and the failure shows when the step is waited for.
    let error = executor.forward(&batch).and_then(|()| executor.logits(0).map(drop)).unwrap_err();
    assert!(
        matches!(&error, ModelError::Kernel(_) | ModelError::Rank { fault: RankFault::TimedOut { .. }, .. }),
        "{error}"
    );
    // Dropping the executor ends its threads.
    drop(executor);
}
