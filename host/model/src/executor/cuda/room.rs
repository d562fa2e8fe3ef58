//! The room for pages on the device of a rank.

use std::fmt;

use crate::error::ModelError;
use crate::executor::{MemoryFraction, option};

/// The room for pages beside everything else on a rank's device. All sizes are in bytes.
pub(super) struct Room {
    pub(super) ordinal: usize,
    /// Size of the device's memory.
    pub(super) total: u64,
    /// Memory in use: the weights, other models, and other programs.
    pub(super) used: u64,
    /// Memory that the steps of all replicas still need, and the reserve.
    pub(super) steps: u64,
    /// Memory that is left to models that are loaded later.
    pub(super) reserved: u64,
    /// The bound on this model, if it has one.
    pub(super) share: Option<Share>,
}

/// The part of a device's memory that a model may take.
#[derive(Clone, Copy)]
pub(super) struct Share {
    pub(super) fraction: MemoryFraction,
    /// Memory that the weights of the model, and the replicas before this one, take on the device.
    pub(super) taken: u64,
    /// Memory that the steps of this replica and of later ones will take.
    pub(super) steps: u64,
}

impl Room {
    /// Returns the memory that is left for pages: what is free, and no more than the model may take.
    pub(super) fn left(&self) -> u64 {
        let free = self.total.saturating_sub(self.used).saturating_sub(self.steps);
        let free = free.saturating_sub(self.reserved);
        let share = self.share.map(|share| {
            share.fraction.of(self.total).saturating_sub(share.taken).saturating_sub(share.steps)
        });
        free.min(share.unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Room { ordinal, total, used, steps, reserved, .. } = *self;
        write!(
            f,
            "cuda:{ordinal} has {}, of which {} are in use by the weights, other models and other programs, {} are for \
             steps, and {} are left to models that are loaded later",
            mib(total),
            mib(used),
            mib(steps),
            mib(reserved)
        )?;
        if let Some(Share { fraction, taken, steps }) = self.share {
            write!(
                f,
                "; gpu_memory = {fraction} allows this model {}, of which {} are taken and {} are for steps",
                mib(fraction.of(total)),
                mib(taken),
                mib(steps)
            )?;
        }
        Ok(())
    }
}

/// Checks that the weights that a model has on a device fit into the part of its memory that the model may take.
pub(super) fn check_weights(
    fraction: Option<MemoryFraction>,
    ordinal: usize,
    total: u64,
    weights: u64,
) -> Result<(), ModelError> {
    match fraction {
        Some(fraction) if weights > fraction.of(total) => {
            let problem = format!(
                "{fraction} of the {} of cuda:{ordinal} are {}, but the weights alone take {} there; raise the fraction, \
                 divide the model among more devices, or choose a smaller model or format",
                mib(total),
                mib(fraction.of(total)),
                mib(weights)
            );
            Err(option("gpu_memory", problem))
        }
        _ => Ok(()),
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_bounds_the_room_but_never_beyond_what_is_free() {
        let room = |used: u64, share: Option<f64>| {
            let share = share.map(|fraction| Share {
                fraction: MemoryFraction::new(fraction).unwrap(),
                taken: 200,
                steps: 50,
            });
            Room { ordinal: 0, total: 1000, used, steps: 60, reserved: 40, share }
        };
        for (used, share, left) in [
            (300, None, 600),
            (300, Some(0.5), 250),
            (800, Some(0.5), 100),
            (300, Some(1.0), 600),
            (300, Some(0.2), 0),
            (950, None, 0),
        ] {
            assert_eq!(room(used, share).left(), left, "{used} {share:?}");
        }
    }
}
