"""PrivateMail, as published in 2021 and 2022 and as it can be made sound."""
