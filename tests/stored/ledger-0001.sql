BEGIN TRANSACTION;
CREATE TABLE nearveil_account (
	name TEXT NOT NULL, 
	opening TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	head TEXT NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "nearveil_account" VALUES('pure','{"owner":"the archive","protects":"database","relation":"add-remove","unit":"image"}','{"epsilon":1.0,"kind":"pure","limits":[1000000000000000000]}','[250000000000000000]',4,'6c8a7b5b2c7847e37276f669952f36c47ebf7cccce5d3af18518ec700a5dc4e5');
INSERT INTO "nearveil_account" VALUES('filter','{"owner":"the archive","protects":"database","relation":"add-remove","unit":"image"}','{"delta":1e-05,"epsilon":1.0,"kind":"filter","limits":[-11206072645530174015,-2781008809391610548,-511172245228367129,343219968843552214,705083178835537172,866010516915910688,939021628305668043,972356293194977405],"orders":[2.0,4.0,8.0,16.0,32.0,64.0,128.0,256.0]}','[2500000000007106,5000000000007106,10000000000007106,20000000000007106,40000000000007107,80000000000007108,160000000000007109,320000000000007113]',2,'bd08b9cac550653fbbbf076098add93bab8005df2db018aebe16c94a775b5b2c');
INSERT INTO "nearveil_account" VALUES('plan','{"owner":"the archive","protects":"database","relation":"add-remove","unit":"image"}','{"delta":1e-05,"epsilon":1.0,"kind":"plan","limits":[2],"plan":["{\"noise_multiplier\":12.0,\"type\":\"GaussianDpEvent\"}"]}','[1]',2,'29ae65012352bedcfc461e5e27cc5642b0086cc234adec675834c64f9424d9d2');
CREATE TABLE nearveil_entry (
	account TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	time TEXT NOT NULL, 
	"key" TEXT, 
	client TEXT, 
	nonce TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	state TEXT NOT NULL, 
	client_state TEXT, 
	hash TEXT NOT NULL, 
	slot TEXT, 
	PRIMARY KEY (account, sequence), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name), 
	UNIQUE (slot)
);
INSERT INTO "nearveil_entry" VALUES('pure',1,'opened','2026-11-16T15:57:35.080526+00:00',NULL,NULL,'c5a3de7e1e7455293e56f38e681ecf56','{"cost":null,"opening":"{\"owner\":\"the archive\",\"protects\":\"database\",\"relation\":\"add-remove\",\"unit\":\"image\"}","terms":"{\"epsilon\":1.0,\"kind\":\"pure\",\"limits\":[1000000000000000000]}"}','ed8d0d4dde91e034ed952952f9e8c328bb8eaedc5bd8f545a15be7189c25c837',NULL,'768bbce8f012d2ddac94ac47a099d59d1ea378ccd7ed544f42da4b5e908d9165',NULL);
INSERT INTO "nearveil_entry" VALUES('pure',2,'quota','2026-11-16T15:57:35.099566+00:00',NULL,'ann','2780d1369e2fb268b1480699724f3f10','{"terms":"{\"epsilon\":0.5,\"kind\":\"pure\",\"limits\":[500000000000000000]}"}','ed8d0d4dde91e034ed952952f9e8c328bb8eaedc5bd8f545a15be7189c25c837','5b7be9560d405967a2d4d7dd455daefb46e4fe2c83ec750ab11cc806e199f28e','12974617c4c9e58825654dcf633a6d8695aa5ad7050fd404b031bdb31f395c74',NULL);
INSERT INTO "nearveil_entry" VALUES('pure',3,'debit','2026-11-16T15:57:35.103309+00:00','first','ann','cc2cbe0dbdb735fab5e40af8d986c904','{"charge":[["{\"epsilon\":0.25,\"type\":\"PureDp\"}",1]],"client_price":[250000000000000000],"price":[250000000000000000]}','f1190ab21cf7fc30eba7e7901a2380f54fea4ef8302723a863635a5c07d5d8c0','ea6bd151d9c9f0f5d989e71b8dd2425d6a07b5f3eacb0a460a0dee37d1885d27','efb74e5047c5f476303dc3f7b1757a1e0dfb71dba405c05fb3b9426661066b68','a84e382c8957da1155467f82a39bcad1ff7850c80fd60b48c39e11f3b4192511');
INSERT INTO "nearveil_entry" VALUES('pure',4,'message','2026-11-16T15:57:35.114631+00:00','first',NULL,'cc2cbe0dbdb735fab5e40af8d986c904','{"message":"a2VwdA=="}','f1190ab21cf7fc30eba7e7901a2380f54fea4ef8302723a863635a5c07d5d8c0',NULL,'6c8a7b5b2c7847e37276f669952f36c47ebf7cccce5d3af18518ec700a5dc4e5','7b7312feb7b0f0edaf5b2fece0a405aa65755d25be0e5f1dff3a25a53b184dbe');
INSERT INTO "nearveil_entry" VALUES('filter',1,'opened','2026-11-16T15:57:35.122823+00:00',NULL,NULL,'853da492723edd4a9851f924b102b951','{"cost":null,"opening":"{\"owner\":\"the archive\",\"protects\":\"database\",\"relation\":\"add-remove\",\"unit\":\"image\"}","terms":"{\"delta\":1e-05,\"epsilon\":1.0,\"kind\":\"filter\",\"limits\":[-11206072645530174015,-2781008809391610548,-511172245228367129,343219968843552214,705083178835537172,866010516915910688,939021628305668043,972356293194977405],\"orders\":[2.0,4.0,8.0,16.0,32.0,64.0,128.0,256.0]}"}','4c3a88f87ff87e879c8bf8ba93b1545ec1f9ef79330242651c345e6cda448994',NULL,'d23b88313b3a45327c7324a5a81a799b621b48e482667805309931a8c8b57c3e',NULL);
INSERT INTO "nearveil_entry" VALUES('filter',2,'debit','2026-11-16T15:57:35.133788+00:00','second',NULL,'385e13f9f9bcb1a97b04f2708e6c8fcf','{"charge":[["{\"noise_multiplier\":20.0,\"type\":\"GaussianDpEvent\"}",1]],"price":[2500000000007106,5000000000007106,10000000000007106,20000000000007106,40000000000007107,80000000000007108,160000000000007109,320000000000007113]}','4f5aa868e94833c601886ff328879678423774444acb667f48eb9098b21eb2f6',NULL,'bd08b9cac550653fbbbf076098add93bab8005df2db018aebe16c94a775b5b2c','44268870e75ef2239cce8d1e5b65432f11fb91010315ec09d4599863758f3e52');
INSERT INTO "nearveil_entry" VALUES('plan',1,'opened','2026-11-16T15:57:35.219882+00:00',NULL,NULL,'b94fbf68f165f126997e646c26772f46','{"cost":0.4074162708455864,"opening":"{\"owner\":\"the archive\",\"protects\":\"database\",\"relation\":\"add-remove\",\"unit\":\"image\"}","terms":"{\"delta\":1e-05,\"epsilon\":1.0,\"kind\":\"plan\",\"limits\":[2],\"plan\":[\"{\\\"noise_multiplier\\\":12.0,\\\"type\\\":\\\"GaussianDpEvent\\\"}\"]}"}','072d5a868dc187eca50e8107fd6ec426de9d2eccc10c648e7361211d352e6ce3',NULL,'c0ffa2b033fa71152abe85703ee81766da84822d9f1062c03d26d0d91f86ff10',NULL);
INSERT INTO "nearveil_entry" VALUES('plan',2,'debit','2026-11-16T15:57:35.226296+00:00','third',NULL,'2030d9d6fca0cc7d70802ff1e9f7dfd3','{"charge":[["{\"noise_multiplier\":12.0,\"type\":\"GaussianDpEvent\"}",1]],"price":[1]}','12a2f5555578dbb1e2917a16f0ea157ab13c0ddfc92657ec15798d03fe2687a9',NULL,'29ae65012352bedcfc461e5e27cc5642b0086cc234adec675834c64f9424d9d2','8739d999a9564622360930035b4a5cf4536649584fa926878c42ed87c2a9e196');
CREATE TABLE nearveil_ledger_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT nearveil_ledger_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "nearveil_ledger_version" VALUES('0001');
CREATE TABLE nearveil_quota (
	account TEXT NOT NULL, 
	client TEXT NOT NULL, 
	terms TEXT NOT NULL, 
	totals TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	PRIMARY KEY (account, client), 
	FOREIGN KEY(account) REFERENCES nearveil_account (name)
);
INSERT INTO "nearveil_quota" VALUES('pure','ann','{"epsilon":0.5,"kind":"pure","limits":[500000000000000000]}','[250000000000000000]',3);
COMMIT;
