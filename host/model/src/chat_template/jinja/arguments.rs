//! What a filter, a test, a method or a function is called with.

use super::{Fault, Value, syntax::Name};

#[derive(Debug, Default)]
pub(super) struct Values {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Name, Value)>,
}

impl Values {
    /// One place for each of these names; what is left over is an error.
    pub(super) fn bind<const COUNT: usize>(
        self,
        what: &str,
        names: [&str; COUNT],
    ) -> Result<[Option<Value>; COUNT], Fault> {
        let mut bound = [const { None }; COUNT];
        if self.positional.len() > COUNT {
            return Err(Fault::new(format!("{what} takes {COUNT} arguments at most")));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == &*name) {
                Some(index) if bound[index].is_none() => bound[index] = Some(value),
                _ => return Err(Fault::new(format!("{what} does not take the argument {name:?}"))),
            }
        }
        Ok(bound)
    }

    pub(super) fn none(self, what: &str) -> Result<(), Fault> {
        self.bind(what, []).map(|[]| ())
    }

    /// The one argument that there must be.
    pub(super) fn one(self, what: &str, name: &str) -> Result<Value, Fault> {
        let [value] = self.bind(what, [name])?;
        value.ok_or_else(|| Fault::new(format!("{what} needs the argument {name:?}")))
    }
}

/// A text that may be left out.
pub(super) fn text<'v>(value: &'v Option<Value>, what: &str) -> Result<Option<&'v str>, Fault> {
    match value {
        None | Some(Value::None | Value::Undefined) => Ok(None),
        Some(value) => {
            let wrong = || Fault::new(format!("{what} takes a text, not {}", value.kind()));
            value.as_text().map(Some).ok_or_else(wrong)
        }
    }
}

/// A whole number that may be left out.
pub(super) fn integer(value: &Option<Value>, what: &str) -> Result<Option<i128>, Fault> {
    match value {
        None | Some(Value::None | Value::Undefined) => Ok(None),
        Some(value) => {
            let wrong = || Fault::new(format!("{what} takes a whole number, not {}", value.kind()));
            value.as_integer().map(Some).ok_or_else(wrong)
        }
    }
}

pub(super) fn is_true(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::is_true)
}
