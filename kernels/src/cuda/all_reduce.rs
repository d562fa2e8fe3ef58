//! The sum over all ranks, through memory that they all see.

use super::{Activation, Address, Launch};
use crate::KernelError;

/// As in the kernel.
pub const MAX_RANKS: usize = 8;
pub const MAX_BLOCKS: u32 = 64;
const THREADS: u32 = 512;
/// Bytes that each rank has beside its values, zero at first: a barrier count of each block, and one of each other rank.
pub const SIGNAL_BYTES: usize = MAX_BLOCKS as usize * (1 + MAX_RANKS) * 4;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllReduceParams {
    /// Of each rank: `[chunks]` of eight values
    pub input: [Address; MAX_RANKS],
    /// Of each rank, in two shots: `[chunks / ranks]`, rounded up
    pub shares: [Address; MAX_RANKS],
    /// Of each rank: [`SIGNAL_BYTES`]
    pub signals: [Address; MAX_RANKS],
    /// `[chunks]`, nobody's input
    pub out: Address,
    /// u32: 1 + the rank that did not come, left alone if all did. The signals are then to be made anew
    pub failure: Address,
    pub chunks: u64,
    /// So often a rank looks for another before it gives up
    pub patience: u64,
    pub rank: u32,
    pub ranks: u32,
}

/// How often what a rank has goes to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shots {
    /// Whole, to everyone: one step.
    One,
    /// A share to its rank, and sums of shares to everyone: fewer bytes.
    Two,
}

impl Shots {
    /// The quicker one. The bounds are those that vLLM measured between NVLink peers.
    pub fn for_size(bytes: u64, ranks: u32) -> Self {
        let most = match ranks {
            ..=2 => u64::MAX,
            3..=4 => 512 << 10,
            _ => 256 << 10,
        };
        if bytes < most { Shots::One } else { Shots::Two }
    }
}

/// All ranks launch the same, with the same bound of blocks: every block has to be resident, beside those of all ranks that share
/// the device and of whatever they still compute.
pub fn launch(
    params: &AllReduceParams,
    shots: Shots,
    activation: Activation,
    most_blocks: u32,
) -> Result<Launch, KernelError> {
    const OP: &str = "all_reduce";
    let limit = MAX_RANKS as u32;
    super::supported((1..=limit).contains(&params.ranks), OP, "ranks", params.ranks, || {
        format!("1 to {limit}")
    })?;
    let others = || format!("less than the {} ranks", params.ranks);
    super::supported(params.rank < params.ranks, OP, "rank", params.rank, others)?;
    let (name, chunks) = match shots {
        Shots::One => ("one", params.chunks),
        Shots::Two => ("two", params.chunks.div_ceil(params.ranks.into())),
    };
    let blocks = chunks.div_ceil(THREADS.into()).clamp(1, most_blocks.clamp(1, MAX_BLOCKS).into()) as u32;
    Ok(Launch::new(format!("all_reduce_{name}_shot_{}", activation.suffix()), [blocks, 1, 1], THREADS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::host::{self, Buffer},
        random::Random,
    };
    use skep_cuda_host::Order;

    /// The memory of some ranks, as each of them sees it.
    struct Ranks {
        input: Vec<Buffer>,
        shares: Vec<Buffer>,
        signals: Vec<Vec<u32>>,
        out: Vec<Buffer>,
        failures: Vec<u32>,
        chunks: usize,
    }

    impl Ranks {
        fn new(activation: Activation, random: &mut Random, ranks: usize, chunks: usize) -> Self {
            let buffers =
                |chunks: usize| (0..ranks).map(|_| activation.zeros(8 * chunks)).collect::<Vec<_>>();
            Ranks {
                input: (0..ranks).map(|_| activation.random(random, 8 * chunks)).collect(),
                shares: buffers(chunks.div_ceil(ranks)),
                // The next barriers are those where counts begin again.
                signals: vec![vec![u32::MAX - 2; SIGNAL_BYTES / 4]; ranks],
                out: buffers(chunks),
                failures: vec![0; ranks],
                chunks,
            }
        }

        fn params(&mut self, rank: usize, patience: u64) -> AllReduceParams {
            let all = |mut of: Box<dyn FnMut(usize) -> Address + '_>| {
                let mut addresses = [Address::NONE; MAX_RANKS];
                let count = self.failures.len();
                addresses[..count].iter_mut().enumerate().for_each(|(rank, address)| *address = of(rank));
                addresses
            };
            AllReduceParams {
                input: all(Box::new(|rank| self.input[rank].address())),
                shares: all(Box::new(|rank| self.shares[rank].address())),
                signals: all(Box::new(|rank| host::address(&self.signals[rank]))),
                out: self.out[rank].address(),
                failure: host::address(&self.failures[rank..]),
                chunks: self.chunks as u64,
                patience,
                rank: rank as u32,
                ranks: self.failures.len() as u32,
            }
        }

        /// Each rank on a thread of its own, with its own order of threads.
        fn run(&mut self, present: &[usize], shots: Shots, activation: Activation, patience: u64) {
            let params: Vec<_> = present.iter().map(|rank| self.params(*rank, patience)).collect();
            std::thread::scope(|scope| {
                for (params, order) in params.iter().zip([Order::FORWARD, Order::BACKWARD].iter().cycle()) {
                    scope.spawn(move || {
                        let Launch { kernel, grid, block, shared_bytes } =
                            launch(params, shots, activation, MAX_BLOCKS).expect("good shapes");
                        let launch = skep_cuda_host::Launch { grid, block, shared_bytes, order: *order };
                        // SAFETY: the buffers live as long as the scope, with the sizes that the shapes say, and the
                        // kernels of the ranks write to places of their own.
                        unsafe { skep_cuda_host::launch(&kernel, &launch, params) }.expect("runs");
                    });
                }
            });
        }
    }

    #[test]
    fn every_rank_has_the_same_sum_each_time() {
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
    fn a_rank_that_does_not_come_is_named() {
        let mut random = Random::fresh();
        for shots in [Shots::One, Shots::Two] {
            for (present, failures) in [(0, [2, 0]), (1, [0, 1])] {
                let mut memory = Ranks::new(Activation::Bf16, &mut random, 2, 10);
                memory.run(&[present], shots, Activation::Bf16, 500);
                assert_eq!(memory.failures, failures);
            }
        }
    }

    #[test]
    fn more_ranks_than_a_kernel_takes_are_refused() {
        let mut memory = Ranks::new(Activation::Bf16, &mut Random::fresh(), 2, 1);
        let good = memory.params(0, 1);
        let refused =
            |params| launch(&params, Shots::One, Activation::F16, 1).expect_err("refused").to_string();
        assert!(refused(AllReduceParams { ranks: 9, ..good }).contains("1 to 8"));
        assert!(refused(AllReduceParams { rank: 2, ..good }).contains("less than the 2"));
    }

    #[test]
    fn large_sums_of_many_ranks_go_in_two_shots() {
        assert_eq!(Shots::for_size(64 << 20, 2), Shots::One);
        assert_eq!(Shots::for_size(300 << 10, 4), Shots::One);
        assert_eq!(Shots::for_size(300 << 10, 8), Shots::Two);
    }
}
