//! Sums values over all ranks, through memory that all of them can access.

use super::{Activation, Address, Family, Kernel, Launch};
use crate::KernelError;
use crate::device_constants::device_constant;

/// Maximum number of ranks, as in the kernel.
pub const MAX_RANKS: usize = device_constant!("all_reduce.cuh", "MAX_RANKS") as usize;
/// Maximum number of blocks of a launch, as in the kernel.
pub const MAX_BLOCKS: u32 = device_constant!("all_reduce.cuh", "MAX_BLOCKS");
const THREADS: u32 = 512;
/// Size of the signals of each rank, which must be zero at first: for each block a barrier count, and one count for
/// each rank.
pub const SIGNAL_BYTES: usize = MAX_BLOCKS as usize * (1 + MAX_RANKS) * 4;

/// The values of all ranks, and the words through which the ranks wait for each other. All but `failure`, `report` and `rank` are
/// the same on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MeetingParams {
    /// The values of each rank.
    pub input: [Address; MAX_RANKS],
    /// The signals of each rank, [`SIGNAL_BYTES`] long.
    pub signals: [Address; MAX_RANKS],
    /// u32 that is set to 1 + the rank that did not arrive, and unchanged if all ranks arrived. After a failure, the signals
    /// must be created again.
    pub failure: Address,
    /// u32 in the memory of the host that is set to the same. Polls read only `failure`, which is nearer.
    pub report: Address,
    /// Number of times that a rank polls for another rank before it fails.
    pub max_polls: u64,
    pub rank: u32,
    pub ranks: u32,
}

/// The parameters of one rank's launch. `shares` and `chunks` are the same on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllReduceParams {
    /// Its inputs have `[chunks]` of eight values.
    pub meeting: MeetingParams,
    /// The summed share of each rank, `[chunks / ranks]` rounded up. Used with two shots only.
    pub shares: [Address; MAX_RANKS],
    /// `[chunks]`. It must not be the input of any rank.
    pub out: Address,
    pub chunks: u64,
}

impl MeetingParams {
    /// Checks the numbers of ranks, for an operation.
    pub(super) fn check(&self, op: &'static str) -> Result<(), KernelError> {
        let limit = MAX_RANKS as u32;
        super::require((1..=limit).contains(&self.ranks), op, "ranks", self.ranks, || {
            format!("1 to {limit}")
        })?;
        let others = || format!("a rank below {}", self.ranks);
        super::require(self.rank < self.ranks, op, "rank", self.rank, others)
    }
}

/// The way in which a sum is distributed over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shots {
    /// Every rank reads the whole input of every other rank: one step.
    One,
    /// Every rank sums one share and then reads the summed shares of the others: fewer bytes.
    Two,
}

impl Shots {
    /// Returns the faster variant for a sum of this size. The thresholds are those that vLLM measured between NVLink peers.
    pub fn for_size(bytes: u64, ranks: u32) -> Self {
        let most = match ranks {
            ..=2 => u64::MAX,
            3..=4 => 512 << 10,
            _ => 256 << 10,
        };
        if bytes < most { Shots::One } else { Shots::Two }
    }
}

/// Returns the launch of one rank. All ranks must launch the same kernel with the same `most_blocks`, which has to be low
/// enough for every block to be resident together with the blocks of all ranks that share the device and of any work that
/// is still running.
pub fn launch(
    params: &AllReduceParams,
    shots: Shots,
    activation: Activation,
    most_blocks: u32,
) -> Result<Launch, KernelError> {
    const OP: &str = "all_reduce";
    params.meeting.check(OP)?;
    let (family, chunks) = match shots {
        Shots::One => (Family::AllReduceOneShot, params.chunks),
        Shots::Two => (Family::AllReduceTwoShot, params.chunks.div_ceil(params.meeting.ranks.into())),
    };
    let blocks = chunks.div_ceil(THREADS.into()).clamp(1, most_blocks.clamp(1, MAX_BLOCKS).into()) as u32;
    Ok(Launch::new(Kernel::of(family).activation(activation), [blocks, 1, 1], THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer},
        random::Random,
    };
    use skep_cuda_host::Order;

    /// The memory of several ranks.
    struct Ranks {
        input: Vec<Buffer>,
        shares: Vec<Buffer>,
        signals: Vec<Vec<u32>>,
        out: Vec<Buffer>,
        failures: Vec<u32>,
        reports: Vec<u32>,
        chunks: usize,
    }

    impl Ranks {
        fn new(activation: Activation, random: &mut Random, ranks: usize, chunks: usize) -> Self {
            let buffers =
                |chunks: usize| (0..ranks).map(|_| activation.zeros(8 * chunks)).collect::<Vec<_>>();
            Ranks {
                input: (0..ranks).map(|_| activation.random(random, 8 * chunks)).collect(),
                shares: buffers(chunks.div_ceil(ranks)),
                // The barrier counts wrap around at the next barriers.
                signals: vec![vec![u32::MAX - 2; SIGNAL_BYTES / 4]; ranks],
                out: buffers(chunks),
                failures: vec![0; ranks],
                reports: vec![0; ranks],
                chunks,
            }
        }

        fn params(&mut self, rank: usize, max_polls: u64) -> AllReduceParams {
            let all = |mut of: Box<dyn FnMut(usize) -> Address + '_>| {
                let mut addresses = [Address::NONE; MAX_RANKS];
                let count = self.failures.len();
                addresses[..count].iter_mut().enumerate().for_each(|(rank, address)| *address = of(rank));
                addresses
            };
            let meeting = MeetingParams {
                input: all(Box::new(|rank| self.input[rank].address())),
                signals: all(Box::new(|rank| host::address(&self.signals[rank]))),
                failure: host::address(&self.failures[rank..]),
                report: host::address(&self.reports[rank..]),
                max_polls,
                rank: rank as u32,
                ranks: self.failures.len() as u32,
            };
            AllReduceParams {
                meeting,
                shares: all(Box::new(|rank| self.shares[rank].address())),
                out: self.out[rank].address(),
                chunks: self.chunks as u64,
            }
        }

        /// Runs each rank on a separate host thread. Ranks alternate between two thread orders.
        fn run(&mut self, present: &[usize], shots: Shots, activation: Activation, max_polls: u64) {
            let params: Vec<_> = present.iter().map(|rank| self.params(*rank, max_polls)).collect();
            std::thread::scope(|scope| {
                for (params, order) in params.iter().zip([Order::FORWARD, Order::BACKWARD].iter().cycle()) {
                    scope.spawn(move || {
                        let Launch { kernel, grid, block, shared_bytes } =
                            launch(params, shots, activation, MAX_BLOCKS).expect("good shapes");
                        let launch = skep_cuda_host::Launch { grid, block, shared_bytes, order: *order };
                        // SAFETY: the buffers outlive the scope and match the shapes, and the kernels of the ranks
                        // write to separate memory.
                        unsafe { skep_cuda_host::launch(&kernel.to_string(), &launch, params) }
                            .expect("runs");
                    });
                }
            });
        }
    }

    #[test]
    fn every_rank_gets_the_same_sum() {
        let mut random = Random::fresh();
        for activation in Activation::ALL {
            for shots in [Shots::One, Shots::Two] {
                for (ranks, chunks) in [(1, 3), (2, 1), (2, 1025), (3, 1000), (8, 77)] {
                    let mut memory = Ranks::new(activation, &mut random, ranks, chunks);
                    for _ in 0..3 {
                        memory.input =
                            (0..ranks).map(|_| activation.random(&mut random, 8 * chunks)).collect();
                        memory.run(&(0..ranks).collect::<Vec<_>>(), shots, activation, 1 << 24);
                        let inputs: Vec<_> = memory.input.iter().map(Buffer::values).collect();
                        let sum = |i: usize| inputs.iter().map(|input| activation.decode(input[i])).sum();
                        let expected: Vec<f64> = (0..8 * chunks).map(sum).collect();
                        activation.assert_close(memory.out[0].values(), &expected, 1e-6);
                        for out in &memory.out {
                            assert_eq!(out.values(), memory.out[0].values(), "{shots:?} of {ranks}");
                        }
                    }
                    assert_eq!(memory.failures, vec![0; ranks]);
                }
            }
        }
    }

    #[test]
    fn a_missing_rank_is_reported() {
        let mut random = Random::fresh();
        for shots in [Shots::One, Shots::Two] {
            for (present, failures) in [(0, [2, 0]), (1, [0, 1])] {
                let mut memory = Ranks::new(Activation::Bf16, &mut random, 2, 10);
                memory.run(&[present], shots, Activation::Bf16, 500);
                assert_eq!(memory.failures, failures);
                assert_eq!(memory.reports, failures);
            }
        }
    }

    #[test]
    fn invalid_ranks_are_rejected() {
        let mut memory = Ranks::new(Activation::Bf16, &mut Random::fresh(), 2, 1);
        let good = memory.params(0, 1);
        let refused = |params: &AllReduceParams| {
            launch(params, Shots::One, Activation::F16, 1).expect_err("rejected").to_string()
        };
        let many = AllReduceParams { meeting: MeetingParams { ranks: 9, ..good.meeting }, ..good };
        assert!(refused(&many).contains("1 to 8"));
        let beyond = AllReduceParams { meeting: MeetingParams { rank: 2, ..good.meeting }, ..good };
        assert!(refused(&beyond).contains("a rank below 2"));
    }

    #[test]
    fn large_sums_of_many_ranks_take_two_shots() {
        assert_eq!(Shots::for_size(64 << 20, 2), Shots::One);
        assert_eq!(Shots::for_size(300 << 10, 4), Shots::One);
        assert_eq!(Shots::for_size(300 << 10, 8), Shots::Two);
    }
}
