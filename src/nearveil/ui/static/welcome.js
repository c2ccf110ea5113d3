// Store the page's secret for the tabs of this browser, and open the page.

localStorage.setItem("nearveil-page", document.querySelector("meta[name=page-secret]").content);
location.replace("/");
