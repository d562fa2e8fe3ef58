//! One tiny agent per behaviour, each an example target of this package.
