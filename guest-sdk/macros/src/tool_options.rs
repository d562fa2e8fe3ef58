//! The options of `#[tool(…)]`: the effects of the tool, how it may be called, and examples of it.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Error, Ident, LitInt, Result, Token, parenthesized, token};

use crate::example::{Example, Expected};

/// The maximum that the host accepts.
const MAX_RETRIES: u32 = 10;
const MAX_TIMEOUT_MS: u32 = 86_400_000;
const KNOWN: &str = "`read_only`, `destructive`, `idempotent`, `open_world`, `needs_approval`, `timeout_ms = 500` and `retries = 2`, each once, and any number of `example(…)`";

/// The parsed options. An option with its name is kept so that errors can point to it.
#[derive(Default)]
pub struct ToolOptions {
    read_only: Option<Ident>,
    destructive: Option<Ident>,
    idempotent: Option<Ident>,
    open_world: Option<Ident>,
    needs_approval: Option<Ident>,
    timeout_ms: Option<(Ident, u32)>,
    retries: Option<(Ident, u32)>,
    examples: Vec<Example>,
}

impl Parse for ToolOptions {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let mut options = Self::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            let unexpected =
                || Error::new(name.span(), format!("unexpected `{name}`; `#[tool]` accepts {KNOWN}"));
            if name == "example" {
                options.examples.push(example(name, input)?);
                continue;
            }
            let flag = match name.to_string().as_str() {
                "read_only" => Some(&mut options.read_only),
                "destructive" => Some(&mut options.destructive),
                "idempotent" => Some(&mut options.idempotent),
                "open_world" => Some(&mut options.open_world),
                "needs_approval" => Some(&mut options.needs_approval),
                _ => None,
            };
            match flag {
                Some(None) if input.peek(Token![=]) => {
                    return Err(Error::new(
                        name.span(),
                        format!("`{name}` takes no value: write the name alone, or remove it"),
                    ));
                }
                Some(flag @ None) => *flag = Some(name),
                Some(Some(_)) => return Err(unexpected()),
                None => {
                    let (number, range) = match name.to_string().as_str() {
                        "timeout_ms" => (&mut options.timeout_ms, 1..=MAX_TIMEOUT_MS),
                        "retries" => (&mut options.retries, 0..=MAX_RETRIES),
                        _ => return Err(unexpected()),
                    };
                    if number.is_some() {
                        return Err(unexpected());
                    }
                    let needs = |_| Error::new(name.span(), format!("`{name}` needs a number: `{name} = 2`"));
                    input.parse::<Token![=]>().map_err(needs)?;
                    let literal: LitInt = input.parse().map_err(needs)?;
                    let value = literal.base10_parse().ok().filter(|value| range.contains(value));
                    let value = value.ok_or_else(|| {
                        let message = format!("`{name}` must be {} to {}", range.start(), range.end());
                        Error::new(literal.span(), message)
                    })?;
                    *number = Some((name, value));
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        options.check()?;
        Ok(options)
    }
}

/// Parses the rest of an `example` option, with the comma after it.
fn example(name: Ident, input: ParseStream<'_>) -> Result<Example> {
    if !input.peek(token::Paren) {
        return Err(crate::example::malformed(&name));
    }
    let content;
    parenthesized!(content in input);
    let example = Example::parse(name, &content)?;
    if !input.is_empty() {
        input.parse::<Token![,]>()?;
    }
    Ok(example)
}

impl ToolOptions {
    /// Checks all examples against the tool's arguments, `None` if they are not known to the macro.
    pub fn check_examples(&self, expected: Option<&[Expected]>) -> Result<()> {
        self.examples.iter().try_for_each(|example| example.check(expected))
    }

    fn check(&self) -> Result<()> {
        if let (Some(_), Some(destructive)) = (&self.read_only, &self.destructive) {
            return Err(Error::new(
                destructive.span(),
                "a tool that is `read_only` changes nothing, so it cannot be `destructive`",
            ));
        }
        match (&self.retries, &self.read_only, &self.idempotent) {
            (Some((name, 1..)), None, None) => Err(Error::new(
                name.span(),
                "only a tool that is `read_only` or `idempotent` can be retried: add one of them, or remove `retries`",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the fields of a `Tool` that follow from the options.
    pub fn fields(&self) -> TokenStream {
        let [read_only, destructive, idempotent, open_world] =
            [&self.read_only, &self.destructive, &self.idempotent, &self.open_world].map(Option::is_some);
        let needs_approval = self.needs_approval.is_some();
        let timeout_ms = match &self.timeout_ms {
            Some((_, value)) => quote! { ::core::option::Option::Some(#value) },
            None => quote! { ::core::option::Option::None },
        };
        let retries = self.retries.as_ref().map_or(0, |(_, value)| *value);
        let examples = self.examples.iter().map(Example::value);
        quote! {
            hints: ::skep_sdk::ToolHints {
                read_only: #read_only,
                destructive: #destructive,
                idempotent: #idempotent,
                open_world: #open_world,
            },
            timeout_ms: #timeout_ms,
            retries: #retries,
            needs_approval: #needs_approval,
            examples: &[#(#examples),*],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse2;

    #[test]
    fn options_become_fields() {
        let options: ToolOptions =
            parse2(quote! { idempotent, open_world, needs_approval, timeout_ms = 500, retries = 2, })
                .expect("valid");
        let fields = options.fields().to_string();
        for part in [
            "idempotent : true",
            "read_only : false",
            "Some (500u32)",
            "retries : 2u32",
            "needs_approval : true",
        ] {
            assert!(fields.contains(part), "{part}: {fields}");
        }
    }

    #[test]
    fn each_misuse_has_a_specific_error() {
        for (options, expected) in [
            (quote! { strict }, "unexpected `strict`"),
            (quote! { idempotent, idempotent }, "each once"),
            (quote! { idempotent = true }, "takes no value"),
            (quote! { read_only, destructive }, "changes nothing"),
            (quote! { retries = 2 }, "`read_only` or `idempotent`"),
            (quote! { idempotent, retries }, "needs a number"),
            (quote! { idempotent, retries = "2" }, "needs a number"),
            (quote! { idempotent, retries = 11 }, "0 to 10"),
            (quote! { timeout_ms = 0 }, "1 to 86400000"),
            (quote! { timeout_ms = 5000000000 }, "1 to 86400000"),
        ] {
            let text = options.to_string();
            let message = parse2::<ToolOptions>(options).err().expect(&text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
