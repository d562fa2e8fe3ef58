//! `example(…)` of `#[tool]`: a short conversation that shows the model how the tool is used, or when it is
//! not.
//!
//! This file checks everything that does not depend on types: the form, and the names of the arguments. The
//! values are checked against the tool's schema by the harness in a test, and by the host when the agent is
//! deployed.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ext::IdentExt;
use syn::parse::ParseStream;
use syn::{Error, Ident, LitStr, Result, Token};

use crate::json::Json;

/// Appended to each error message.
const FORM: &str = "an example is `example(user = \"Roll two dice\", call = {\"count\": 2}, result = [3, 4], answer = \"You rolled 3 \
                    and 4.\")`, or without `call` and `result` if the tool is not called";

/// A parsed example, whose values are not checked yet.
pub struct Example {
    name: Ident,
    user: LitStr,
    /// The arguments and the result.
    call: Option<(Ident, Json, Json)>,
    answer: LitStr,
}

/// An argument of the tool, with everything that an example can be checked against.
pub struct Expected {
    pub name: String,
    pub is_required: bool,
}

impl Example {
    /// Parses the content of the parentheses after `name`.
    pub fn parse(name: Ident, input: ParseStream<'_>) -> Result<Self> {
        let (mut user, mut call, mut result, mut answer) = (None, None, None, None);
        while !input.is_empty() {
            let key = Ident::parse_any(input)
                .map_err(|error| Error::new(error.span(), format!("{error}; {FORM}")))?;
            let unexpected = || Error::new(key.span(), format!("unexpected `{key}`; {FORM}"));
            input.parse::<Token![=]>().map_err(|_| unexpected())?;
            match key.to_string().as_str() {
                "user" if user.is_none() => user = Some(text(&key, input)?),
                "answer" if answer.is_none() => answer = Some(text(&key, input)?),
                "call" if call.is_none() => call = Some((key, input.parse::<Json>()?)),
                "result" if result.is_none() => result = Some((key, input.parse::<Json>()?)),
                _ => return Err(unexpected()),
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        let missing = |what: &str| Error::new(name.span(), format!("this example has no `{what}`; {FORM}"));
        let call = match (call, result) {
            (Some((key, call)), Some((_, result))) => Some((key, call, result)),
            (Some(_), None) => return Err(missing("result")),
            (None, Some(_)) => return Err(missing("call")),
            (None, None) => None,
        };
        let user = user.ok_or_else(|| missing("user"))?;
        let answer = answer.ok_or_else(|| missing("answer"))?;
        Ok(Example { name, user, call, answer })
    }

    /// Checks that the call names the tool's arguments. `None` means that `serde` may rename the arguments,
    /// so that their names are not known here.
    pub fn check(&self, expected: Option<&[Expected]>) -> Result<()> {
        let Some((key, call, _)) = &self.call else { return Ok(()) };
        let Json::Object(properties) = call else {
            let message =
                "a call must be an object with one property for each argument: `call = {\"count\": 2}`";
            return Err(Error::new(key.span(), message));
        };
        for (index, property) in properties.iter().enumerate() {
            let name = property.name.value();
            if properties[..index].iter().any(|other| other.name.value() == name) {
                return Err(Error::new(property.name.span(), format!("`{name}` appears twice")));
            }
            if let Some(expected) = expected
                && !expected.iter().any(|argument| argument.name == name)
            {
                let known: Vec<String> =
                    expected.iter().map(|argument| format!("`{}`", argument.name)).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                let message = format!("the tool has no argument `{name}`; its arguments are: {known}");
                return Err(Error::new(property.name.span(), message));
            }
        }
        let is_given = |name: &str| properties.iter().any(|property| property.name.value() == name);
        let mut required = expected.unwrap_or_default().iter().filter(|argument| argument.is_required);
        match required.find(|argument| !is_given(&argument.name)) {
            Some(Expected { name, .. }) => Err(Error::new(
                self.name.span(),
                format!("the call of this example lacks the argument `{name}`"),
            )),
            None => Ok(()),
        }
    }

    /// Returns the example as the tokens of a `skep_sdk::__private::Example`.
    pub fn value(&self) -> TokenStream {
        let Example { user, answer, .. } = self;
        let call = match &self.call {
            Some((_, call, result)) => {
                let (call, result) = (call.text(), result.text());
                quote! { ::core::option::Option::Some((#call, #result)) }
            }
            None => quote! { ::core::option::Option::None },
        };
        quote! { ::skep_sdk::__private::Example { user: #user, call: #call, answer: #answer } }
    }
}

/// Returns the error for `example` without parentheses.
pub fn malformed(name: &Ident) -> Error {
    Error::new(name.span(), FORM)
}

fn text(key: &Ident, input: ParseStream<'_>) -> Result<LitStr> {
    input
        .parse()
        .map_err(|error: Error| Error::new(error.span(), format!("`{key}` must be a text in quotes; {FORM}")))
}

#[cfg(test)]
mod tests {
    use crate::tool::expand;
    use proc_macro2::TokenStream;
    use quote::quote;

    fn expanded(examples: TokenStream) -> Result<String, String> {
        let function = quote! {
            /// Rolls dice.
            fn roll(count: u32, sides: Option<u32>) -> Vec<u32> { body() }
        };
        expand(examples, function).map(|tokens| tokens.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn good_examples_expand() {
        let tokens = expanded(quote! {
            idempotent,
            example(user = "Roll two dice", call = {"count": 2}, result = [3, 4], answer = "3 and 4."),
            example(answer = "Hello!", user = "Hi"),
        })
        .expect("both are valid");
        for part in [r#""{\"count\":2}" , "[3,4]""#, r#"user : "Hi""#, "idempotent : true"] {
            assert!(tokens.contains(part), "{part}: {tokens}");
        }
    }

    #[test]
    fn each_misuse_has_a_specific_error() {
        let good = quote! { user = "x", answer = "y", };
        for (example, expected) in [
            (quote! { answer = "y" }, "no `user`"),
            (quote! { user = "x" }, "no `answer`"),
            (quote! { #good call = {"count": 1} }, "no `result`"),
            (quote! { #good result = [1] }, "no `call`"),
            (quote! { #good user = "z" }, "unexpected `user`"),
            (quote! { #good reply = "z" }, "unexpected `reply`"),
            (quote! { user = hello, answer = "y" }, "`user` must be a text in quotes"),
            (quote! { "Roll two dice" }, "an example is `example("),
            (quote! { #good call = [1], result = [1] }, "a call must be an object"),
            (quote! { #good call = {"count": one}, result = [1] }, "not JSON"),
            (quote! { #good call = {"dice": 1}, result = [1] }, "its arguments are: `count`, `sides`"),
            (quote! { #good call = {"sides": 1}, result = [1] }, "lacks the argument `count`"),
            (quote! { #good call = {"count": 1, "count": 1}, result = [1] }, "appears twice"),
        ] {
            let message = expanded(quote! { example(#example) }).expect_err(&example.to_string());
            assert!(message.contains(expected), "{example}: {message}");
        }
        let message = expanded(quote! { example = "Roll" }).expect_err("no parentheses");
        assert!(message.contains("an example is `example("), "{message}");
    }
}
