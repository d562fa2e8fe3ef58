//! Tests of collectives between threads: their results, and the effect of a faulty rank on the others.

use std::sync::mpsc::channel;
use std::time::Duration;

use super::*;
use crate::error::RankFault;

/// Long enough for a busy machine. Only a failing test waits this long.
const PATIENT: Duration = Duration::from_secs(60);

/// Runs every rank's part on a separate thread and returns the results in the order of the ranks. No rank terminates
/// before all ranks are done.
fn on_ranks<T: Send>(
    tensor: usize,
    stages: usize,
    deadline: Duration,
    part: impl Fn(usize, &mut Links<Local>) -> T + Sync,
) -> Vec<T> {
    let (_, links) = Local::connect(tensor, stages, deadline);
    std::thread::scope(|scope| {
        let part = &part;
        let threads: Vec<_> = links
            .into_iter()
            .enumerate()
            .map(|(rank, mut links)| scope.spawn(move || (part(rank, &mut links), links)))
            .collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        ended.into_iter().map(|(result, _)| result).collect()
    })
}

/// Runs one sum. The rank terminates afterwards.
fn reduce_once(mut links: Links<Local>) -> Result<(), ModelError> {
    links.tensor.all_reduce(&mut [1.0])
}

fn fault(result: Result<(), ModelError>) -> (usize, RankFault) {
    match result.unwrap_err() {
        ModelError::Rank { rank, fault } => (rank, fault),
        other => panic!("{other}"),
    }
}

#[test]
fn a_sum_adds_in_rank_order_and_has_the_same_bits_on_every_rank() {
    let own = |rank: usize| [[1e8f32, 0.1], [1.0, 0.2], [-1e8, 0.3]][rank];
    let sums = on_ranks(3, 1, PATIENT, |rank, links| {
        let mut values = own(rank);
        links.tensor.all_reduce(&mut values).unwrap();
        values
    });
    let expected = [0, 1].map(|at| (own(0)[at] + own(1)[at]) + own(2)[at]);
    assert_eq!(sums, [expected; 3]);
}

#[test]
fn consecutive_collectives_do_not_mix() {
    on_ranks(4, 1, PATIENT, |rank, links| {
        for round in 0..1000 {
            let mut values = vec![(rank * 1000 + round) as f32; 1 + round % 7];
            links.tensor.all_reduce(&mut values).unwrap();
            assert!(values.iter().all(|value| *value == (6000 + 4 * round) as f32), "{round}");
            // The parts have different lengths.
            let part = vec![rank as f32; rank];
            let mut seen = Vec::new();
            links.tensor.all_gather(&part, 6, |rank, part| seen.push((rank, part.to_vec()))).unwrap();
            assert_eq!(seen, [0, 1, 2, 3].map(|rank| (rank, vec![rank as f32; rank])));
        }
    });
}

#[test]
fn messages_arrive_in_order_from_a_sender_that_is_ahead() {
    on_ranks(2, 3, PATIENT, |rank, links| {
        let (stage, number) = (rank / 2, rank % 2);
        for round in 0..200 {
            let mut values = vec![0.0; 3];
            if stage > 0 {
                links.pipeline.receive(stage - 1, &mut values).unwrap();
                assert_eq!(
                    values[0],
                    (1000 * number + round) as f32,
                    "messages must come from the rank's own column, in order"
                );
                assert_eq!(values[1], stage as f32);
            }
            if stage < 2 {
                values = vec![(1000 * number + round) as f32, (stage + 1) as f32, 0.0];
                links.pipeline.send(stage + 1, &values).unwrap();
            }
        }
    });
}

#[test]
fn a_terminated_rank_is_an_error_on_all_others() {
    let (_, links) = Local::connect(2, 2, PATIENT);
    std::thread::scope(|scope| {
        for (rank, mut links) in links.into_iter().enumerate() {
            scope.spawn(move || match rank {
                0 => assert_eq!(fault(links.tensor.all_reduce(&mut [1.0])), (1, RankFault::Terminated)),
                1 => drop(links),
                _ => assert_eq!(fault(links.pipeline.receive(0, &mut [1.0])), (1, RankFault::Terminated)),
            });
        }
    });
}

#[test]
fn ranks_that_make_different_calls_get_an_error_that_names_both() {
    for (length, gathers) in [(3, false), (2, true)] {
        let faults = on_ranks(2, 1, PATIENT, |rank, links| {
            let mut values = vec![1.0; if rank == 1 { length } else { 2 }];
            let result = match rank == 1 && gathers {
                true => links.tensor.all_gather(&values, 2, |_, _| {}),
                false => links.tensor.all_reduce(&mut values),
            };
            let (_, first) = fault(result);
            // The failure is permanent, whatever is called next.
            assert_eq!(fault(links.tensor.all_reduce(&mut [1.0])).1, first);
            first
        });
        assert_eq!(faults[0], faults[1]);
        let message = faults[0].to_string();
        assert!(message.contains("AllReduce of 2 values, number 1"), "{message}");
        let other = if gathers { "AllGather of 2" } else { "AllReduce of 3" };
        assert!(message.contains(other), "{message}");
    }
    let faults = on_ranks(1, 2, PATIENT, |rank, links| match rank {
        0 => links.pipeline.send(1, &[1.0, 2.0]).map(|()| None).unwrap(),
        _ => Some(fault(links.pipeline.receive(0, &mut [0.0; 3]))),
    });
    assert!(matches!(faults[1], Some((0, RankFault::CallMismatch { .. }))), "{faults:?}");
}

#[test]
fn parts_that_do_not_add_up_to_the_total_are_an_error() {
    let faults = on_ranks(2, 1, PATIENT, |_, links| {
        fault(links.tensor.all_gather(&[1.0, 2.0], 5, |_, _| panic!("must not be seen")))
    });
    assert!(faults.iter().all(|(_, fault)| matches!(fault, RankFault::CallMismatch { .. })), "{faults:?}");
}

#[test]
fn a_stalled_rank_is_an_error_after_the_deadline() {
    let deadline = Duration::from_millis(30);
    let (world, links) = Local::connect(3, 1, deadline);
    let mut links = links.into_iter();
    let stalled = links.next().unwrap();
    world.set_idle(0, false);
    let threads: Vec<_> = links.map(|links| std::thread::spawn(move || reduce_once(links))).collect();
    for thread in threads {
        assert_eq!(fault(thread.join().unwrap()), (0, RankFault::TimedOut { deadline }));
    }
    drop(stalled);
}

#[test]
fn a_slow_rank_is_not_an_error_while_any_rank_makes_progress() {
    let (world, links) = Local::connect(2, 1, Duration::from_secs(1));
    let mut links = links.into_iter();
    let (slow, waiting) = (links.next().unwrap(), links.next().unwrap());
    let (started, has_started) = channel();
    let (finished, is_finished) = channel();
    let thread = std::thread::spawn(move || {
        started.send(()).unwrap();
        let result = reduce_once(waiting);
        finished.send(()).unwrap();
        result
    });
    has_started.recv().unwrap();
    // Much longer than the deadline, with signs of progress in between.
    for _ in 0..25 {
        world.advance();
        assert!(
            is_finished.recv_timeout(Duration::from_millis(50)).is_err(),
            "the waiting rank failed too early"
        );
    }
    reduce_once(slow).unwrap();
    thread.join().unwrap().unwrap();
}

#[test]
fn ranks_outside_the_group_are_errors() {
    on_ranks(1, 1, PATIENT, |_, links| {
        assert!(matches!(fault(links.pipeline.send(1, &[])), (1, RankFault::NoSuchRank { ranks: 1 })));
        assert!(links.pipeline.receive(0, &mut []).is_err(), "a rank cannot receive from itself");
    });
    assert!(Solo.send(1, &[]).is_err() && Solo.receive(1, &mut []).is_err());
    let mut values = [1.5];
    Solo.all_reduce(&mut values).unwrap();
    Solo.all_gather(&values, 1, |rank, part| assert_eq!((rank, part), (0, &[1.5][..]))).unwrap();
}
