//! Compares the fused kernel with the separate ones, bit for bit, with a thread for each rank.

use skep_cuda_host::Order;

use super::*;
use crate::cuda::Address;
use crate::cuda::all_reduce::{self, AllReduceParams, MAX_RANKS, SIGNAL_BYTES};
use crate::cuda::host::{self, Buffer};
use crate::cuda::rms_norm;
use crate::random::Random;

/// Number of sums that follow each other without any other wait.
const ROUNDS: usize = 6;
const EPSILON: f32 = 1e-5;
const MAX_POLLS: u64 = 1 << 26;

/// Rows that ranks add up, round after round, to a residual that every rank has.
struct Case {
    activation: Activation,
    ranks: usize,
    rows: usize,
    width: usize,
    /// The parts of each round and rank.
    parts: Vec<Vec<Buffer>>,
    residual: Buffer,
    weight: Buffer,
}

/// The memory of one rank. Rounds take the two inputs in turn.
struct Rank {
    inputs: [Buffer; 2],
    signals: Vec<u32>,
    failure: Vec<u32>,
    /// The residual sums, which are the residual of the next round, and the normed rows of all rounds.
    hidden: Buffer,
    normed: Vec<Buffer>,
}

/// An address that threads of ranks may write to.
#[derive(Clone, Copy)]
struct Target(*mut u16);

// SAFETY: each thread writes only to the memory of its rank, between launches that order these writes.
unsafe impl Send for Target {}

impl Case {
    fn random(activation: Activation, ranks: usize, rows: usize, width: usize) -> Self {
        let mut random = Random::fresh();
        let mut values = |count| activation.random(&mut random, count);
        Case {
            activation,
            ranks,
            rows,
            width,
            parts: (0..ROUNDS).map(|_| (0..ranks).map(|_| values(rows * width)).collect()).collect(),
            residual: values(rows * width),
            weight: values(width),
        }
    }

    fn memory(&self) -> Vec<Rank> {
        let zeros = || self.activation.zeros(self.rows * self.width);
        let rank = |_| Rank {
            inputs: [zeros(), zeros()],
            // The barrier counts wrap around at the next barriers.
            signals: vec![u32::MAX - 2; SIGNAL_BYTES / 4],
            failure: vec![0; 2],
            hidden: Buffer::new(self.residual.values().to_vec()),
            normed: (0..ROUNDS).map(|_| zeros()).collect(),
        };
        (0..self.ranks).map(rank).collect()
    }

    fn norm(&self, x: Address, rank: &Rank, round: usize) -> RmsNormParams {
        RmsNormParams {
            x,
            residual: rank.hidden.address(),
            sum: rank.hidden.address(),
            weight: self.weight.address(),
            out: rank.normed[round].address(),
            width: self.width as u32,
            epsilon: EPSILON,
        }
    }

    /// Computes all rounds with the separate kernels, and returns the sums and the normed rows of each round.
    fn expected(&self) -> (Buffer, Vec<Buffer>) {
        let mut memory = self.memory();
        for round in 0..ROUNDS {
            let sums: Vec<Buffer> =
                (0..self.ranks).map(|_| self.activation.zeros(self.rows * self.width)).collect();
            let meetings: Vec<MeetingParams> =
                (0..self.ranks).map(|own| meeting(&memory, own, &self.parts[round], MAX_POLLS)).collect();
            std::thread::scope(|scope| {
                for (meeting, out) in meetings.iter().zip(&sums) {
                    let chunks = (self.rows * self.width / 8) as u64;
                    let params = AllReduceParams {
                        meeting: *meeting,
                        shares: [Address::NONE; MAX_RANKS],
                        out: out.address(),
                        chunks,
                    };
                    let activation = self.activation;
                    scope.spawn(move || {
                        let launch = all_reduce::launch(&params, Shots::One, activation, MAX_BLOCKS);
                        run(&launch.expect("good shapes"), &params, Order::FORWARD);
                    });
                }
            });
            let params = self.norm(sums[0].address(), &memory[0], round);
            let launch = rms_norm::launch(&params, self.rows as u32, self.activation).expect("good shapes");
            run(&launch, &params, Order::FORWARD);
        }
        let rank = memory.swap_remove(0);
        (rank.hidden, rank.normed)
    }

    /// Computes all rounds with the fused kernel. Ranks wait for each other only in it.
    fn fused(&self, most_blocks: u32) -> Vec<Rank> {
        let memory = self.memory();
        let launches: Vec<Vec<(Target, AllReduceNormParams)>> = (0..self.ranks)
            .map(|own| {
                (0..ROUNDS)
                    .map(|round| {
                        let inputs: Vec<&Buffer> =
                            memory.iter().map(|rank| &rank.inputs[round % 2]).collect();
                        let meeting = meeting_of(&memory, own, &inputs, MAX_POLLS);
                        let norm = self.norm(Address::NONE, &memory[own], round);
                        let rows = self.rows as u32;
                        (
                            Target(meeting.input[own].0 as *mut u16),
                            AllReduceNormParams { meeting, norm, rows },
                        )
                    })
                    .collect()
            })
            .collect();
        let orders = [Order::FORWARD, Order::BACKWARD, Order::shuffled(7)];
        std::thread::scope(|scope| {
            for (own, (launches, order)) in launches.into_iter().zip(orders.iter().cycle()).enumerate() {
                scope.spawn(move || {
                    for (round, (input, params)) in launches.into_iter().enumerate() {
                        let part = self.parts[round][own].values();
                        let Target(input) = input;
                        // SAFETY: the input is as long as the part, and other ranks read it only after this rank's launch.
                        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), input, part.len()) };
                        let launch = launch(&params, self.activation, most_blocks).expect("good shapes");
                        run(&launch, &params, *order);
                    }
                });
            }
        });
        memory
    }
}

fn meeting(memory: &[Rank], own: usize, inputs: &[Buffer], max_polls: u64) -> MeetingParams {
    meeting_of(memory, own, &inputs.iter().collect::<Vec<_>>(), max_polls)
}

fn meeting_of(memory: &[Rank], own: usize, inputs: &[&Buffer], max_polls: u64) -> MeetingParams {
    let mut input = [Address::NONE; MAX_RANKS];
    let mut signals = [Address::NONE; MAX_RANKS];
    for (rank, (of, values)) in memory.iter().zip(inputs).enumerate() {
        (input[rank], signals[rank]) = (values.address(), host::address(&of.signals));
    }
    MeetingParams {
        input,
        signals,
        failure: host::address(&memory[own].failure[..1]),
        report: host::address(&memory[own].failure[1..]),
        max_polls,
        rank: own as u32,
        ranks: memory.len() as u32,
    }
}

fn run<P: Copy>(launch: &Launch, params: &P, order: Order) {
    let Launch { kernel, grid, block, shared_bytes } = *launch;
    let launch = skep_cuda_host::Launch { grid, block, shared_bytes, order };
    // SAFETY: the buffers outlive the launch and match the shapes, and the kernels of the ranks write to separate memory.
    unsafe { skep_cuda_host::launch(&kernel.to_string(), &launch, params) }.expect("runs");
}

#[test]
fn sums_and_norms_have_the_bits_of_the_separate_kernels_on_every_rank() {
    for activation in Activation::ALL {
        for (ranks, rows, width, most_blocks) in [
            (2, 1, 8, MAX_BLOCKS),
            (2, 5, 576, MAX_BLOCKS),
            (2, 3, 4096, 2),
            (3, 2, 1000, MAX_BLOCKS),
            (4, 7, 64, 3),
            (4, 1, 8192, 1),
            (8, 2, 2048, MAX_BLOCKS),
        ] {
            let case = Case::random(activation, ranks, rows, width);
            let (hidden, normed) = case.expected();
            for (rank, found) in case.fused(most_blocks).iter().enumerate() {
                let what = format!("rank {rank} of {ranks}, {rows} rows of {width} in {activation}");
                assert_eq!(found.failure, [0, 0], "{what}");
                assert!(found.hidden.values() == hidden.values(), "residual sums of {what}");
                for (round, (found, expected)) in found.normed.iter().zip(&normed).enumerate() {
                    assert!(found.values() == expected.values(), "norms of {what}, round {round}");
                }
            }
        }
    }
}

#[test]
fn a_missing_rank_is_reported() {
    let case = Case::random(Activation::Bf16, 2, 1, 64);
    for (present, expected) in [(0, [2, 2]), (1, [1, 1])] {
        let memory = case.memory();
        let meeting = meeting(&memory, present, &case.parts[0], 500);
        let norm = case.norm(Address::NONE, &memory[present], 0);
        let params = AllReduceNormParams { meeting, norm, rows: 1 };
        run(&launch(&params, Activation::Bf16, 1).expect("good shapes"), &params, Order::FORWARD);
        assert_eq!(memory[present].failure, expected);
    }
}

#[test]
fn few_rows_that_every_rank_reads_whole_are_summed_and_normed_at_once() {
    assert!(fits(1, 4096, 2) && fits(MAX_ROWS, 8192, 2) && fits(8, 8192, 8));
    assert!(!fits(0, 4096, 2) && !fits(MAX_ROWS + 1, 64, 2), "the rows of one wave of blocks");
    assert!(!fits(64, 8192, 4) && !fits(32, 8192, 8), "larger sums are divided among the ranks");
    assert!(!fits(1, MAX_WIDTH + 8, 2));
    let case = Case::random(Activation::Bf16, 2, 1, 64);
    let memory = case.memory();
    let meeting = meeting(&memory, 0, &case.parts[0], 1);
    let good = AllReduceNormParams { meeting, norm: case.norm(Address::NONE, &memory[0], 0), rows: 1 };
    let refused = |params| launch(&params, Activation::Bf16, 1).expect_err("rejected").to_string();
    assert!(refused(AllReduceNormParams { rows: MAX_ROWS + 1, ..good }).contains("at most 64"));
    let norm = RmsNormParams { width: 60, ..good.norm };
    assert!(refused(AllReduceNormParams { norm, ..good }).contains("a multiple of 8"));
    let meeting = MeetingParams { ranks: 9, ..good.meeting };
    assert!(refused(AllReduceNormParams { meeting, ..good }).contains("1 to 8"));
}
