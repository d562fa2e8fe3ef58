//! The choice of the device that runs a model, and its textual form.

use std::fmt;
use std::str::FromStr;

/// A choice of device, written `auto`, `cpu`, `cuda` or `cuda:0,1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA devices if any of them can run the model, or else the CPU.
    Auto,
    Cpu,
    Cuda(Ordinals),
}

/// A set of CUDA devices of this machine, iterated in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordinals(u64);

impl Ordinals {
    /// The device that the driver lists first.
    pub const FIRST: Ordinals = Ordinals(1);
    /// The highest supported ordinal.
    pub const MAX: usize = 63;

    /// Returns the first `count` devices, or `None` if `count` is 0.
    pub fn first(count: usize) -> Option<Self> {
        let ordinals = match count {
            0 => return None,
            count if count > Self::MAX => u64::MAX,
            count => (1 << count) - 1,
        };
        Some(Ordinals(ordinals))
    }

    /// Returns the set of these ordinals, or `None` if the list is empty or an ordinal is too high.
    pub(crate) fn of(ordinals: impl IntoIterator<Item = usize>) -> Option<Self> {
        let mut all = 0;
        for ordinal in ordinals {
            all |= if ordinal <= Self::MAX { 1 << ordinal } else { return None };
        }
        (all != 0).then_some(Ordinals(all))
    }

    /// Returns the ordinals in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..=Self::MAX).filter(move |ordinal| self.0 >> ordinal & 1 == 1)
    }

    /// Returns the number of devices in the set.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }
}

impl fmt::Display for Ordinals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, ordinal) in self.iter().enumerate() {
            write!(f, "{}{ordinal}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Ordinals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut ordinals = 0u64;
        for part in text.split(',') {
            let ordinal =
                part.parse::<usize>().ok().filter(|ordinal| *ordinal <= Self::MAX).ok_or_else(|| {
                    format!(
                        "{part:?} is not a device; devices are numbered 0 to {}, as in cuda:0,1",
                        Self::MAX
                    )
                })?;
            if ordinals >> ordinal & 1 == 1 {
                return Err(format!("device {ordinal} is named twice"));
            }
            ordinals |= 1 << ordinal;
        }
        Ok(Ordinals(ordinals))
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.pad("auto"),
            DeviceChoice::Cpu => f.pad("cpu"),
            DeviceChoice::Cuda(ordinals) => f.pad(&format!("cuda:{ordinals}")),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceChoice::Auto),
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::Cuda(Ordinals::FIRST)),
            Some(("cuda", ordinals)) => ordinals.parse().map(DeviceChoice::Cuda),
            _ => Err(format!("unknown device {text:?}; expected one of auto, cpu, cuda, cuda:0,1")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_parses_from_its_text() {
        for text in ["auto", "cpu", "cuda:0", "cuda:0,3,63"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(Ordinals::FIRST)));
        assert_eq!(Ordinals::first(3).unwrap().to_string(), "0,1,2");
        assert_eq!(Ordinals::first(99).unwrap().count(), 64);
        assert_eq!("cuda:2,1".parse::<DeviceChoice>().unwrap().to_string(), "cuda:1,2");
        for (text, problem) in [
            ("gpu", "one of auto, cpu"),
            ("cuda:", "\"\" is not a device"),
            ("cuda:64", "numbered 0 to 63"),
            ("cuda:1,1", "device 1 is named twice"),
            ("cpu:0", "unknown device"),
        ] {
            assert!(text.parse::<DeviceChoice>().unwrap_err().contains(problem), "{text}");
        }
    }
}
