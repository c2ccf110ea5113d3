// Keeps the secret of this tab, and goes on to the page.

sessionStorage.setItem("nearveil-page", document.querySelector("meta[name=page-secret]").content);
location.replace("/");
